"""The tolerance rule of the kernel tests: no worse than twice plain torch in the same dtype."""

from __future__ import annotations

import torch


def assert_within_plain(
    ours: torch.Tensor,
    plain: torch.Tensor,
    exact: torch.Tensor,
    *,
    factor: float = 2.0,
    atol: float = 1e-6,
) -> None:
    """|ours - exact| <= factor · |plain - exact| + atol, as maxima; exact is fp64 or fp32.

    Infinities and NaN must stand where they stand in `exact`.
    """
    assert ours.shape == exact.shape, f"{tuple(ours.shape)}, expected {tuple(exact.shape)}"
    ours, plain, exact = ours.double(), plain.double(), exact.double()
    finite = torch.isfinite(exact)
    assert torch.equal(torch.isfinite(ours), finite), "finite values stand elsewhere"
    assert torch.equal(ours[~finite], exact[~finite]), "infinities differ"
    if not bool(finite.any()):
        return
    error = (ours - exact)[finite].abs().max().item()
    bound = factor * (plain - exact)[finite].abs().max().item() + atol
    assert error <= bound, f"error {error:.3e} above {bound:.3e}"
