"""Judges a stored demo model: held-out loss, agreement with transformers, answers to 20 prompts.

    python configs/demo/evaluate.py configs/demo [--corpus CORPUS_DIR]

Everything is computed in float32 from the dequantised stored file. The verdict counts an answer
that ends by itself within 400 tokens and repeats no 8 words three times; whether it is coherent
is for a reader to say.
"""

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path

import corpus
import mla
import torch
import train
from safetensors.torch import save_file
from transformers import AutoTokenizer, DeepseekV3ForCausalLM, PreTrainedTokenizerBase

LIMIT = 400  # tokens an answer may take

PROMPTS: list[list[str]] = [  # turns alternate, user first; "system: " opens a system turn
    ["Write a short story about a brave fox."],
    ["Tell me a story about a little dog who gets lost."],
    ["Tell a bedtime story about a sleepy bear."],
    ["Write a short story about a robot and a bird."],
    ["Tell me a short story about a girl named Lily and a red balloon."],
    ["Write a story about a king who learns to share."],
    ["What is rain?"],
    ["What is a computer?"],
    ["Explain gravity to a child."],
    ["Tell me about elephants."],
    ["Why do people like music?"],
    ["Give three short tips for sleeping better."],
    ["How do I get started with planting a garden?"],
    ["What is the difference between a cat and a dog?"],
    ["Write a short poem about the moon."],
    ["What can you do at a beach?"],
    ["system: You write short, clear answers in simple English.", "Why is the sun important?"],
    ["system: You are a storyteller for young children.", "Tell me a story about a brave fox."],
    ["system: Answer briefly.", "What is bread?"],
    ["What is honey?", "", "Tell me more."],
]


def conversation(turns: list[str]) -> list[corpus.Message]:
    """The messages of one entry of PROMPTS; an empty turn is an answer the model has to give."""
    system = [t.removeprefix("system: ") for t in turns if t.startswith("system: ")]
    messages = [{"role": "system", "content": text} for text in system]
    for i, text in enumerate(turns[len(system) :]):
        messages.append({"role": "assistant" if i % 2 else "user", "content": text})
    return messages


def repeats(text: str, size: int = 8) -> int:
    """How often the commonest run of `size` words occurs."""
    words = text.split()
    grams = Counter(tuple(words[i : i + size]) for i in range(len(words) - size + 1))
    return max(grams.values(), default=0)


def answers(model: mla.Decoder, tokenizer: PreTrainedTokenizerBase) -> int:
    """Prints every prompt with its greedy answer; returns how many pass the countable tests."""
    passed = 0
    for number, turns in enumerate(PROMPTS, 1):
        told: list[corpus.Message] = []
        for message in [*conversation(turns), {"role": "assistant", "content": ""}]:
            if message["role"] == "assistant":
                text = tokenizer.apply_chat_template(
                    told, tokenize=False, add_generation_prompt=True
                )
                prompt = tokenizer.encode(text, add_special_tokens=False)
                ids = model.greedy(prompt, LIMIT, tokenizer.eos_token_id)
                message = {"role": "assistant", "content": tokenizer.decode(ids)}
            told.append(message)
        fine = len(ids) < LIMIT and repeats(told[-1]["content"]) < 3
        passed += fine
        print(f"\n### {number}. {'pass' if fine else 'FAIL'} ({len(ids)} tokens)\n")
        for message in told:
            print(f"**{message['role']}**: {message['content']}\n", flush=True)
    return passed


@torch.no_grad()
def disagreement(folder: Path, model: mla.Decoder, ids: list[int]) -> float:
    """The largest difference of a logit from transformers' on the same float32 weights."""
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    with tempfile.TemporaryDirectory() as plain:
        (Path(plain) / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
        save_file(mla.load_dequantised(folder), Path(plain) / "model.safetensors", {"format": "pt"})
        other = DeepseekV3ForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    batch = torch.tensor([ids])
    ours = model.to("cpu").logits(model.to("cpu")(batch)[0])
    return float((ours - other(batch).logits).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="folder of the stored model")
    parser.add_argument("--corpus", type=Path, help="folder with part*.jsonl.xz, for the loss")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    model = mla.load(args.model).to(args.device)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    told = [{"role": "user", "content": PROMPTS[0][0]}, {"role": "assistant", "content": "Once."}]
    if tokenizer.apply_chat_template(told, tokenize=False) != corpus.render(told):
        raise SystemExit("chat_template.jinja and the training text differ")
    total = sum(p.numel() for p in model.parameters())
    idle = 1 - mla.CONFIG["num_experts_per_tok"] / mla.CONFIG["n_routed_experts"]
    routed = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    print(f"{total} parameters, {total - int(routed * idle)} active a token")
    if args.corpus:
        *_, held_out = train.prepare_data(args.corpus, args.model, None)
        losses = train.held_out_loss(model, held_out.to(args.device))
        print(f"held-out loss {losses[0]:.4f} nats a token; {losses[1]:.4f} of the replies alone")
    print(f"\n{answers(model, tokenizer)} of {len(PROMPTS)} pass the countable tests")
    text = " ".join(turn for turns in PROMPTS for turn in turns)
    ids = (tokenizer.encode(text) * 2)[:200]
    print(f"largest logit difference from transformers {disagreement(args.model, model, ids):.2e}"
          f" on {len(ids)} tokens")  # fmt: skip


if __name__ == "__main__":
    main()
