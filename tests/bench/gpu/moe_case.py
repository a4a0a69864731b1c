"""Shapes, random layers and a timer for the scripts on experts."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from kernels.triton.grouped_gemm import FP8

COPY = 4.25e12  # bytes a second, read + write, of a large copy on an H200
MATMUL = 766e12  # bf16 FLOPs a second there


@dataclass(frozen=True)
class Case:
    """One MoE layer: routed and shared experts in one stack."""

    name: str
    experts: int
    shared: int
    inner: int
    hidden: int
    top_k: int  # without the shared ones
    fp8: bool

    @property
    def width(self) -> int:
        return self.top_k + self.shared

    @property
    def total(self) -> int:
        return self.experts + self.shared

    def expert_bytes(self) -> int:
        return 3 * self.inner * self.hidden * (1 if self.fp8 else 2)

    def flops(self, tokens: int) -> int:
        return 6 * tokens * self.width * self.inner * self.hidden


CASES = {
    "v2-lite": Case("v2-lite", 64, 2, 1408, 2048, 6, False),
    "v3": Case("v3", 256, 1, 2048, 7168, 8, True),
}


@dataclass(frozen=True)
class Layer:
    gate_up: torch.Tensor
    down: torch.Tensor
    scale_gate_up: torch.Tensor | None
    scale_down: torch.Tensor | None


def make_layer(case: Case, experts: int | None = None) -> Layer:
    count = experts or case.total
    shapes = [(count, 2 * case.inner, case.hidden), (count, case.hidden, case.inner)]
    if not case.fp8:
        first, second = (torch.empty(s, dtype=torch.bfloat16, device="cuda") for s in shapes)
        first.normal_(std=case.hidden**-0.5)
        second.normal_(std=case.inner**-0.5)
        return Layer(first, second, None, None)
    codes, scales = [], []
    for shape in shapes:
        # All codes but the largest and NaN: sign and magnitude in one byte.
        raw = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
        codes.append(raw.bitwise_and_(0xF7).view(FP8))
        blocks = (shape[0], shape[1] // 128, shape[2] // 128)
        scales.append(torch.rand(blocks, device="cuda") * shape[2] ** -0.5 / 60)
    return Layer(codes[0], codes[1], scales[0], scales[1])


def make_choices(
    case: Case, tokens: int, sets: int, experts: int | None = None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """`sets` random choices; the shared experts last, as they are served."""
    out = []
    for _ in range(sets):
        if experts is not None:
            ids = torch.zeros(tokens, case.width, dtype=torch.int32, device="cuda")
        else:
            routed = torch.rand(tokens, case.experts, device="cuda").topk(case.top_k).indices
            shared = torch.arange(case.experts, case.total, device="cuda").expand(tokens, -1)
            ids = torch.cat((routed, shared), 1).int().contiguous()
        out.append((ids, torch.rand(tokens, case.width, device="cuda")))
    return out


def touched_bytes(case: Case, ids: torch.Tensor) -> int:
    return len(ids.unique()) * case.expert_bytes()


def graph_ms(calls: list[Callable[[], object]], runs: int = 20) -> float:
    """Median milliseconds of one of `calls`: all are captured into one graph, that is replayed."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for run in range(runs + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if run >= 3:
            times.append(start.elapsed_time(end))
    return statistics.median(times) / len(calls)
