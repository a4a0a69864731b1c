"""The demo's vocabulary: control tokens, the tokenizer's training, texts as ids."""

import json
import re
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers


def special(name: str) -> str:
    """A control token's text; the bars are full-width, as DeepSeek writes them."""
    return f"<\uff5c{name}\uff5c>".replace(" ", "\u2581")


BOS, EOS, PAD = special("begin of sentence"), special("end of sentence"), special("\u2581pad\u2581")
ROLES = {"system": special("System"), "user": special("User"), "assistant": special("Assistant")}
TOOLS = "calls begin,calls end,call begin,call end,sep,outputs begin,outputs end,output begin"
MARKS = [special(f"tool {name}") for name in [*TOOLS.split(","), "output end"]]


def train_tokenizer(texts: list[str], vocab_size: int, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json: byte-level BPE, digits one by one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [BOS, EOS, PAD]
    marks = [*ROLES.values(), *MARKS, "<think>", "</think>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in control]
        + [AddedToken(t, special=False, normalized=False) for t in marks],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    splitter = re.compile("|".join(map(re.escape, control + marks)))
    tokenizer.train_from_iterator((splitter.sub("\n\n", t).strip() for t in texts), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 65536,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def encode(texts: list[str], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """(all token ids end to end [N] uint16, tokens of each text [len(texts)] int64)."""
    ids = [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)]
    return np.concatenate([np.array(i, np.uint16) for i in ids]), np.array([len(i) for i in ids])
