"""The second kernel of `mqa.py`: each token's partial answers become its answer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.mqa_plan import MQACapacity


def combine_parts(
    plan: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    part_out: torch.Tensor,
    part_lse: torch.Tensor,
    capacity: MQACapacity,
    *,
    early: bool,
) -> None:
    """Fills out [T, H, L] and lse fp32 [T, H] (natural log) of the plan's units.

    plan: `plan_mqa`'s buffer on the device. part_out [max_parts · H, L], part_lse fp32
    [max_parts · H], base 2. `early`: launched before the kernel that makes the parts has ended.
    """
    tokens, heads, latent = out.shape
    at, last = capacity.at, out if lse is None else lse  # without lse, out only fills the place
    # Few tokens have many parts each, and then few columns a program make more programs.
    tokens = max(tokens, 1)
    parts = min(max(triton.next_power_of_2(2 * capacity.num_cuts // tokens), 4), 128)
    columns = min(latent, max(64, min(256, 4096 // parts)))
    programs = max(1, min(tokens * heads * (latent // columns), 32 * capacity.num_programs))
    _combine[(programs,)](
        plan, out, last, part_out, part_lse,
        out.stride(0), out.stride(1), last.stride(0), last.stride(1),
        at.units, at.unit_parts, at.parts,
        HEADS=heads,
        LATENT=latent,
        COLUMNS=columns,
        PARTS=parts,
        WITH_LSE=lse is not None,
        DEPENDENT=early,
        num_warps=4 if parts > 8 else 2,
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip


@triton.jit
def _combine(
    plan, out, lse, part_out, part_lse,
    out_t, out_h, lse_t, lse_h,
    at_units, at_unit_parts, at_parts,
    HEADS: tl.constexpr, LATENT: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    WITH_LSE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Each step: all parts of one token's head, for some columns; PARTS of them at a time.

    DEPENDENT: it has the plan at hand when `_attend` ends, and reads the parts only then.
    """
    columns = tl.arange(0, COLUMNS)
    jobs = tl.load(plan) * HEADS * (LATENT // COLUMNS)
    for job in range(tl.program_id(0), jobs, tl.num_programs(0)):
        first_col = job % (LATENT // COLUMNS) * COLUMNS
        unit = job // (LATENT // COLUMNS) // HEADS
        head = job // (LATENT // COLUMNS) % HEADS
        token = tl.load(plan + at_units + unit).to(tl.int64)
        first = tl.load(plan + at_unit_parts + unit)
        last = tl.load(plan + at_unit_parts + unit + 1)
        if DEPENDENT:
            tl.extra.cuda.gdc_wait()
        top = float("-inf")
        total = 0.0
        acc = tl.zeros([COLUMNS], tl.float32)
        for start in range(first, last, PARTS):
            index = start + tl.arange(0, PARTS)
            there = index < last
            part = tl.load(plan + at_parts + index, mask=there, other=0).to(tl.int64)
            place = part * HEADS + head
            weight = tl.load(part_lse + place, mask=there, other=float("-inf"))
            values = tl.load(
                part_out + place[:, None] * LATENT + first_col + columns[None, :],
                mask=there[:, None],
                other=0.0,
            ).to(tl.float32)
            new_top = tl.maximum(top, tl.max(weight, 0))
            safe = tl.where(new_top == float("-inf"), 0.0, new_top)
            weight = tl.exp2(weight - safe)  # a part without keys holds 0, not NaN
            keep = tl.exp2(top - safe)
            acc = acc * keep + tl.sum(values * weight[:, None], 0)
            total = total * keep + tl.sum(weight, 0)
            top = new_top
        total = tl.maximum(total, 1.0)
        acc = acc / total
        tl.store(
            out + token * out_t + head * out_h + first_col + columns, acc.to(out.dtype.element_ty)
        )
        if WITH_LSE:
            log_sum = (top + tl.log2(total)) / 1.4426950408889634
            tl.store(lse + token * lse_t + head * lse_h, log_sum, mask=first_col == 0)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()  # without jobs too: whoever waits for this waits for `_attend`
