"""The whole model against transformers on random checkpoints, in fp32, with and without the cache.

Logits within 1e-4 on a ragged batch, and 64 greedy tokens equal: cold, and again on the rows that
the first run left in the prefix cache.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import torch
from support.tiny_checkpoint import make_checkpoint
from transformers import AutoModelForCausalLM

from radix_mla.cache.prefix_cache import Lease, PrefixCache
from radix_mla.config import EngineConfig, Hardware
from radix_mla.engine.model_runner import ModelRunner, make_pool
from radix_mla.engine.step import Chunk, StepPlan
from radix_mla.models.checkpoint import load_model
from radix_mla.models.deepseek import DeepseekForCausalLM
from radix_mla.models.hf_config import ModelConfig

LENGTHS = (1, 2, 17, 64, 200)
TOLERANCE = 1e-4

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "v2": {"arch": "v2"},
    "v2-lora-groups": {
        "arch": "v2",
        "q_lora": 24,
        "topk_method": "group_limited_greedy",
        "routed_scaling": 16.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "v3": {"arch": "v3"},
    "v3-raw-weights": {
        "arch": "v3",
        "q_lora": None,
        "norm_topk_prob": False,
        "groups": 1,
        "top_groups": 1,
        "yarn_factor": None,
        "attention_bias": True,
    },
    "v3-halves": {"arch": "v3", "rope_interleave": False, "attention_bias": True},
    "v3-odd-dims": {"arch": "v3", "nope": 24, "rope": 8, "kv_lora": 40, "v": 20, "heads": 3},
    # Large and bf16: its matrices run from packed fp16.
    "v3-packed": {
        "arch": "v3",
        "dtype": "bf16",
        "hidden": 512,
        "vocab": 600,
        "intermediate": 512,
        "moe_intermediate": 512,
    },
    "moonlight": {
        "arch": "v3",
        "q_lora": None,
        "shared_experts": 2,
        "groups": 1,
        "top_groups": 1,
        "routed_scaling": 2.446,
        "yarn_factor": None,
    },
    "glm": {
        "arch": "glm",
        "nope": 192,
        "v": 256,
        "groups": 1,
        "top_groups": 1,
        "routed_scaling": 1.8,
        "extra_config": {"rms_norm_eps": 1e-5},
    },
    "glm-halves": {
        "arch": "glm",
        "layers": 3,
        "first_dense": 2,
        "rope_interleave": False,
        "extra_config": {"mlp_layer_types": ["dense", "dense", "sparse"]},
    },
    "youtu": {"arch": "youtu"},
    "youtu-halves": {"arch": "youtu", "rope_interleave": False, "q_lora": None, "tied": False},
}
# As on a GPU: stacked experts, one kernel for norm, rotation and row write (its torch form here).
FUSED = ("v2", "v2-lora-groups", "v3", "v3-raw-weights", "moonlight", "glm", "youtu-halves")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@dataclass
class Pair:
    """Our model and transformers' eager one, of the same checkpoint."""

    config: ModelConfig
    model: DeepseekForCausalLM
    reference: torch.nn.Module

    def reference_logits(self, tokens: np.ndarray) -> torch.Tensor:
        """fp32 [T, vocab]."""
        with torch.inference_mode():
            logits: torch.Tensor = self.reference(
                torch.from_numpy(tokens.astype(np.int64))[None]
            ).logits
        return logits[0]


class PairOf(Protocol):
    def __call__(self, name: str, *, fused: bool = False) -> Pair: ...


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> PairOf:
    pairs: dict[str, Pair] = {}

    def get(name: str, *, fused: bool = False) -> Pair:
        key = f"{name}-fused" if fused else name
        if key not in pairs:
            path = make_checkpoint(tmp_path_factory.mktemp(key), **CHECKPOINTS[name])
            config = ModelConfig.from_dir(path)
            pairs[key] = Pair(
                config,
                load_model(path, config, dtype=torch.float32, device="cpu", fused=fused),
                AutoModelForCausalLM.from_pretrained(
                    path, dtype=torch.float32, attn_implementation="eager"
                ),
            )
            shutil.rmtree(path)
        return pairs[key]

    return get


@dataclass
class Machine:
    """A runner with a prefix cache, driven by hand."""

    runner: ModelRunner
    cache: PrefixCache
    steps: int = 0
    paths: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, pair: Pair, *, page_size: int = 16, **knobs: Any) -> Machine:
        config = EngineConfig(
            **{"model": "", "dtype": "fp32", "kv_cache_tokens": 2048} | knobs, page_size=page_size
        ).resolve(pair.config, Hardware("cpu", 1 << 30, 1, False))
        runner = ModelRunner(pair.model, make_pool(pair.config, config), config)
        return cls(runner, PrefixCache(config.num_pages, config.page_size))

    def run(self, lease: Lease, tokens: np.ndarray, start: int) -> torch.Tensor:
        """Computes tokens[start:]; their logits [T - start, vocab]."""
        copies = self.cache.grow(lease, len(tokens))
        pages = -(-len(tokens) // self.cache.page_size)
        new = tokens[start:]
        decode = start > 0 and len(new) == 1
        chunk = Chunk(new, start, lease.page_table[:pages].copy(), len(new), decode)
        self.steps += 1
        result = self.runner.execute(StepPlan(self.steps, [chunk], copies))
        assert result.rows_finite.all()
        for path, count in result.paths.items():
            self.paths[path] = self.paths.get(path, 0) + count
        return result.logits

    def generate(
        self, prompt: np.ndarray, num_tokens: int, *, chunk: int
    ) -> tuple[np.ndarray, torch.Tensor, int]:
        """Greedy: (prompt + output, logits of every computed position, cached tokens)."""
        lease = self.cache.acquire(prompt, limit=len(prompt) - 1)
        cached, tokens, logits = lease.num_cached, prompt, []
        for end in [*range(cached + chunk, len(prompt), chunk), len(prompt)]:
            start = cached + sum(len(part) for part in logits)
            logits.append(self.run(lease, prompt[:end], start))
            self.cache.commit(lease, prompt[:end])
        for _ in range(num_tokens):
            token = np.array([int(logits[-1][-1].argmax())], dtype=np.int32)
            tokens = np.concatenate((tokens, token))
            if len(tokens) < len(prompt) + num_tokens:
                logits.append(self.run(lease, tokens, len(tokens) - 1))
        self.cache.commit(lease, tokens[:-1])  # the last token has no row
        self.cache.release(lease)
        self.cache.audit()
        return tokens, torch.cat(logits), cached


def prompt_of(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.int32)


@pytest.mark.parametrize(
    ("name", "fused"), [*((name, False) for name in CHECKPOINTS), *((name, True) for name in FUSED)]
)
def test_ragged_batch_of_prompts(name: str, fused: bool, pair_of: PairOf) -> None:
    pair = pair_of(name, fused=fused)
    machine = Machine.of(pair)
    prompts = [prompt_of(length, seed=length) for length in LENGTHS]
    chunks, page = [], 0
    for prompt in prompts:
        pages = -(-len(prompt) // 16)
        table = np.arange(page, page + pages, dtype=np.int32)
        chunks.append(Chunk(prompt, 0, table, len(prompt), False))
        page += pages
    logits = machine.runner.execute(StepPlan(0, chunks, [])).logits
    for prompt, got in zip(prompts, logits.split([len(p) for p in prompts]), strict=True):
        want = pair.reference_logits(prompt)
        assert float((got - want).abs().max()) <= TOLERANCE, len(prompt)


@pytest.mark.parametrize(
    ("name", "form", "page_size", "fused"),
    [
        ("v2", "absorbed", 1, False),
        ("v2", "non_absorbed", 16, False),
        ("v2", "one_shot", 64, False),
        ("v3", "absorbed", 16, False),
        ("v3", "non_absorbed", 64, False),
        ("v3", "one_shot", 1, False),
        ("v3", "auto", 64, False),
        ("v3", "auto", 16, True),
        ("v3-odd-dims", "auto", 16, False),
        ("v3-packed", "auto", 16, False),
        ("moonlight", "auto", 64, True),
        ("glm", "auto", 16, False),
        ("youtu", "auto", 1, False),
    ],
)
def test_greedy_tokens_cold_and_on_a_hit(
    name: str, form: str, page_size: int, fused: bool, pair_of: PairOf
) -> None:
    pair = pair_of(name, fused=fused)
    # 48 context rows at a time: the later chunks and the hit have several context chunks.
    machine = Machine.of(
        pair,
        page_size=page_size,
        attention_form=form,
        workspace_tokens=2048 if form == "one_shot" else 48,
    )
    prompt = prompt_of(200)
    cold, cold_logits, cached = machine.generate(prompt, 64, chunk=72)
    assert cached == 0
    want = pair.reference_logits(cold[:-1])  # also the logits of every greedy choice
    assert float((cold_logits - want).abs().max()) <= TOLERANCE
    assert torch.equal(torch.from_numpy(cold[200:]).long(), want[199:].argmax(dim=-1))

    again, _, cached = machine.generate(prompt, 64, chunk=72)
    assert cached == 199
    assert np.array_equal(again, cold)

    # A second turn on prompt and answer: the hit ends inside a page and holds decoded rows.
    turn = np.concatenate((cold, prompt_of(77, seed=1)))
    warm, warm_logits, cached = machine.generate(turn, 64, chunk=72)
    assert cached == 263
    want = pair.reference_logits(warm[:-1])
    assert float((warm_logits - want[263:]).abs().max()) <= TOLERANCE
    assert torch.equal(torch.from_numpy(warm[len(turn) :]).long(), want[len(turn) - 1 :].argmax(-1))
    if form != "auto":
        assert form in machine.paths
    assert machine.paths["absorbed"] > 0  # decode


def test_m07_logits_at_far_positions(pair_of: PairOf) -> None:
    """A scale without mscale² is right at position 0 only; checked beyond the original context."""
    pair = pair_of("v2")
    machine = Machine.of(pair)
    prompt = prompt_of(700)
    _, logits, _ = machine.generate(prompt, 1, chunk=2048)
    want = pair.reference_logits(prompt)
    for position in (0, 1, 7, 200, 699):
        assert float((logits[position] - want[position]).abs().max()) <= TOLERANCE, position


@pytest.mark.parametrize("arch", ["v2", "v3"])
def test_bf16_is_as_close_to_fp32_as_transformers_bf16(arch: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, arch=arch, dtype="bf16")
    config = ModelConfig.from_dir(path)

    def reference(dtype: torch.dtype, tokens: np.ndarray) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
        with torch.inference_mode():
            logits: torch.Tensor = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits
        return logits[0].float().log_softmax(-1)

    prompt = prompt_of(150)
    model = load_model(path, config, dtype=torch.bfloat16, device="cpu")
    machine = Machine.of(Pair(config, model, torch.nn.Identity()), dtype="bf16")
    _, logits, _ = machine.generate(prompt, 1, chunk=64)
    exact = reference(torch.float32, prompt)
    theirs = float((reference(torch.bfloat16, prompt) - exact).abs().mean())
    assert float((logits.log_softmax(-1) - exact).abs().mean()) <= 1.5 * theirs
    top = exact.topk(2).values
    clear = top[:, 0] - top[:, 1] > 20 * theirs
    assert int(clear.sum()) > 20
    assert torch.equal(logits.argmax(-1)[clear], exact.argmax(-1)[clear])
