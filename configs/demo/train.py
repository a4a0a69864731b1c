"""Trains the bundled demo model from the corpus, on one GPU, in minutes.

    python configs/demo/train.py CORPUS_DIR OUT_DIR --minutes 8

CORPUS_DIR holds part*.jsonl.xz. OUT_DIR receives config.json, generation_config.json,
model.safetensors (FP8 blocks) and, unless it already has them, the tokenizer's files.
"""

import argparse
import json
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import corpus
import mla
import numpy as np
import torch
import torch.nn.functional as F
import vocabulary
from tokenizers import Tokenizer
from torch import Tensor, nn

WINDOW = 4096  # tokens of a training row
PROMPT_WEIGHT = 0.1  # loss weight of a token that the model will never have to write
FP8_FROM = 0.72  # share of the training after which the weights are seen through FP8
SAVE_EVERY = 120.0  # seconds


class Packed:
    """Conversations end to end, reshuffled into rows of WINDOW tokens each time round."""

    def __init__(self, ids: np.ndarray, lengths: np.ndarray, eos: int, assistant: int) -> None:
        self.ids = torch.from_numpy(ids.astype(np.int32))
        self.lengths = torch.from_numpy(lengths)
        self.starts = self.lengths.cumsum(0) - self.lengths
        opened = (self.ids == assistant).cumsum(0)
        closed = (self.ids == eos).cumsum(0)
        answer = (opened > closed) & (self.ids != assistant) | (self.ids == eos)
        self.weights = torch.where(answer, 1.0, PROMPT_WEIGHT)

    def to(self, device: str) -> "Packed":
        for name in ("ids", "lengths", "starts", "weights"):
            setattr(self, name, getattr(self, name).to(device))
        return self

    def batches(self, rows: int, order: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields (ids [rows, WINDOW + 1], weights of the same shape) over the texts in order."""
        lengths, device = self.lengths[order], self.ids.device
        begin = self.starts[order] - (lengths.cumsum(0) - lengths)
        take = torch.arange(int(lengths.sum()), device=device) + begin.repeat_interleave(lengths)
        span = torch.arange(WINDOW + 1, device=device)
        count = (len(take) - 1) // (rows * WINDOW)
        for corner in torch.arange(count, device=device)[:, None] * rows + torch.arange(
            rows, device=device
        ):
            index = take[corner[:, None] * WINDOW + span]
            yield self.ids[index].long(), self.weights[index]


class Muon(torch.optim.Optimizer):
    """Momentum steps made orthogonal by Newton-Schulz, scaled to AdamW's usual step size."""

    def __init__(self, params: list[nn.Parameter], lr: float, decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})
        shapes = sorted({tuple(p.shape[-2:]) for p in params})
        self.groups = [[p for p in params if tuple(p.shape[-2:]) == s] for s in shapes]
        self.momenta = [torch.zeros_like(self.stack(g)) for g in self.groups]

    @staticmethod
    def stack(tensors: list[Tensor]) -> Tensor:
        """Matrices [O, I] and stacks of them [E, O, I] as one [n, O, I]."""
        return torch.cat([t if t.dim() == 3 else t[None] for t in tensors])

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        lr, decay = self.param_groups[0]["lr"], self.param_groups[0]["decay"]
        for group, momentum in zip(self.groups, self.momenta, strict=True):
            grad = self.stack([p.grad for p in group if p.grad is not None])
            momentum.lerp_(grad, 0.05)
            update = orthogonal(grad.lerp(momentum, 0.95))
            update *= 0.2 * max(update.shape[-2:]) ** 0.5
            sizes = [p.shape[0] if p.dim() == 3 else 1 for p in group]
            for p, change in zip(group, update.split(sizes), strict=True):
                p.mul_(1 - lr * decay).sub_(change.view_as(p), alpha=lr)


def orthogonal(x: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices to x [n, O, I], roughly (5 quintic steps)."""
    tall = x.shape[-2] > x.shape[-1]
    x = (x.mT if tall else x).bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if tall else x).float()


def token_scores(model: mla.Decoder, ids: Tensor, half: bool) -> tuple[Tensor, Tensor]:
    """(log-probabilities after each of ids[:, :-1] [B, T, vocab], expert loads [MoE layers, E])."""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=half):
        states, loads = model(ids[:, :-1])
        logits = model.logits(states)
    return logits.float().log_softmax(-1), loads


def echoes(ids: Tensor, reach: int = 128) -> tuple[Tensor, Tensor]:
    """What would copy the text so far: (token that followed the latest two tokens' last occurrence
    within `reach` [B, T], whether there is one and ids[:, 1:] is something else [B, T])."""
    seen = ids[:, :-1]
    pairs = F.pad(seen[:, :-1], (1, 0), value=-1) * 65536 + seen
    earlier = F.pad(pairs, (reach, 0), value=-1).unfold(1, reach, 1)[:, :-1]  # [B, T, reach]
    nexts = F.pad(seen, (reach - 1, 0)).unfold(1, reach, 1)
    order = torch.arange(1, reach + 1, device=ids.device)
    latest = ((earlier == pairs[..., None]) * order).amax(-1)
    echo = nexts.gather(-1, (latest[..., None] - 1).clamp_min(0))[..., 0]
    return echo, (latest > 0) & (echo != ids[:, 1:])


def loss_of(
    model: mla.Decoder, ids: Tensor, weights: Tensor, unlikelihood: float
) -> tuple[Tensor, Tensor]:
    """(weighted mean loss of ids[:, 1:], expert loads [MoE layers, E]), in bfloat16 on a GPU.

    Unlikelihood (Welleck et al. 2019) also punishes probability given to a wrong echo.
    """
    scores, loads = token_scores(model, ids, half=ids.is_cuda)
    losses = -scores.gather(-1, ids[:, 1:, None])[..., 0]
    if unlikelihood:
        echo, wrong = echoes(ids)
        chance = scores.gather(-1, echo[..., None])[..., 0].exp()
        losses = losses - unlikelihood * wrong * torch.log1p(-chance.clamp_max(0.999))
    return (losses * weights[:, 1:]).sum() / weights[:, 1:].sum(), loads


@torch.no_grad()
def held_out_loss(model: mla.Decoder, data: Packed) -> tuple[float, float]:
    """Mean float32 loss in nats of (every token, the assistants' tokens alone)."""
    sums = torch.zeros(4, dtype=torch.float64)
    order = torch.arange(len(data.lengths), device=data.ids.device)
    for ids, weights in data.batches(1, order):
        scores, _ = token_scores(model, ids, half=False)
        losses = -scores.gather(-1, ids[:, 1:, None])[..., 0]
        reply = (weights[:, 1:] == 1).float()
        parts = [losses.sum(), losses.numel(), (losses * reply).sum(), reply.sum()]
        sums += torch.tensor([float(part) for part in parts])
    return float(sums[0] / sums[1]), float(sums[2] / sums[3])


def prepare_data(folder: Path, out: Path, limit: int | None) -> list[Packed]:
    """Loose, strict and held-out tokens; makes the tokenizer first if OUT has none."""
    sets = corpus.read(folder, limit)
    if not (out / "tokenizer.json").exists():
        vocabulary.train_tokenizer(sets[1][:40_000], mla.CONFIG["vocab_size"], out)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    marks = [tokenizer.token_to_id(t) for t in (vocabulary.EOS, vocabulary.ROLES["assistant"])]
    packed = [Packed(*vocabulary.encode(texts, tokenizer), *marks) for texts in sets]
    for name, data in zip(("loose", "strict", "held out"), packed, strict=True):
        print(f"{name}: {len(data.lengths)} conversations, {len(data.ids)} tokens")
    return packed


def save(model: mla.Decoder, out: Path) -> None:
    """Writes the model in FP8 with its two configuration files."""
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    names = {
        "bos_token_id": vocabulary.BOS,
        "eos_token_id": vocabulary.EOS,
        "pad_token_id": vocabulary.PAD,
    }
    ids = {key: tokenizer.token_to_id(token) for key, token in names.items()}
    mla.save(model, mla.CONFIG | ids, out)
    text = json.dumps(ids | {"do_sample": False, "max_new_tokens": 512}, indent=2)
    (out / "generation_config.json").write_text(text + "\n")


def train(args: argparse.Namespace) -> None:
    began = time.monotonic()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    args.out.mkdir(parents=True, exist_ok=True)
    template = Path(__file__).with_name("chat_template.jinja")
    if not (args.out / template.name).exists():
        shutil.copy(template, args.out)
    sets = prepare_data(args.corpus, args.out, args.lines)
    loose, strict, held_out = (packed.to(args.device) for packed in sets)
    print(f"data ready after {time.monotonic() - began:.0f} s", flush=True)
    model = (mla.load(args.init) if args.init else mla.Decoder(mla.CONFIG)).to(args.device).train()
    matrices = [p for n, p in model.named_parameters() if "_proj" in n]
    others = [p for n, p in model.named_parameters() if "_proj" not in n]
    model.dropout = args.dropout
    muon = Muon(matrices, args.lr, args.decay)
    adam = torch.optim.AdamW(others, args.lr, betas=(0.9, 0.95), weight_decay=0.0)
    biases = [b for n, b in model.named_buffers() if n.endswith("correction_bias")]
    compiled = torch.compile(loss_of, dynamic=False) if args.device == "cuda" else loss_of

    started = saved = time.monotonic()
    budget = args.minutes * 60 - (started - began)
    total = int(args.epochs * len(strict.ids) / (args.rows * WINDOW))
    step, done = 0, 0.0
    while done < 1:
        data = loose if done < args.loose else strict
        order = torch.randperm(len(data.lengths)).to(args.device)
        for ids, weights in data.batches(args.rows, order):
            now = time.monotonic()
            done = max(step / total, (now - started) / budget)
            if done >= 1 or (data is loose and done >= args.loose):
                break
            rate = min(1.0, (step + 1) / 100, (1 - done) / 0.7)
            model.fp8.fill_(float(done >= FP8_FROM))
            for optimiser in (muon, adam):
                optimiser.param_groups[0]["lr"] = args.lr * rate
            loss, loads = compiled(model, ids, weights, args.unlikelihood)
            loss.backward()
            muon.step()
            adam.step()
            model.zero_grad(set_to_none=True)
            for bias, load in zip(biases, loads.detach(), strict=True):
                bias += 1e-3 * rate * (load.mean() - load).sign()
            step += 1
            if step % 100 == 0 or step in (1, 10, 30):
                shown = float(loss.detach())
                speed = step * args.rows * WINDOW / (time.monotonic() - started)
                spread = float((loads.max(1).values / loads.mean(1)).max())
                note = f"{done:.3f} loss {shown:.4f} {speed:.0f} tokens/s load {spread:.2f}"
                print(f"step {step}/{total} {note}", flush=True)
                if not math.isfinite(shown):
                    raise SystemExit("the loss is no longer finite")
            if now - saved > SAVE_EVERY:
                save(model, args.out)
                saved = time.monotonic()
    save(model, args.out)
    seconds, tokens = time.monotonic() - started, step * args.rows * WINDOW
    every, replies = held_out_loss(mla.load(args.out).to(args.device), held_out)
    print(f"{step} steps, {tokens} tokens, {seconds:.0f} s after {started - began:.0f} s for data")
    print(f"held-out loss of the stored file {every:.4f}, of the replies alone {replies:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", type=Path, help="folder with part*.jsonl.xz")
    parser.add_argument("out", type=Path, help="folder to write the model to")
    parser.add_argument("--minutes", type=float, default=8, help="time to use, data included")
    parser.add_argument("--epochs", type=float, default=12, help="of strict data, at most")
    parser.add_argument("--rows", type=int, default=16, help=f"rows of {WINDOW} tokens a step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--decay", type=float, default=0.5, help="weight decay of the matrices")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--loose", type=float, default=0.4, help="first share, on loose data")
    parser.add_argument("--unlikelihood", type=float, default=0.3, help="weight; 0 for none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lines", type=int, help="use only the first corpus lines")
    parser.add_argument("--init", type=Path, help="continue from this model folder")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
