"""A small byte-level BPE tokenizer folder, made on the spot, with a chat template."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS, USER, ASSISTANT, SYSTEM = (
    "<|begin_of_sentence|>",
    "<|end_of_sentence|>",
    "<|User|>",
    "<|Assistant|>",
    "<|System|>",
)
SPECIAL = (BOS, EOS, USER, ASSISTANT, SYSTEM)

_BODY = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'system' -%}{{ '<|System|>' + message.content }}"
    "{%- elif message.role == 'user' -%}{{ '<|User|>' + message.content }}"
    "{%- elif message.role == 'tool' -%}{{ '<tool>' + message.content + '</tool>' }}"
    "{%- else -%}{{ '<|Assistant|>' }}"
    "{%- if message.reasoning_content -%}"
    "{{ '<think>' + message.reasoning_content + '</think>' }}{%- endif -%}"
    "{{ message.content }}"
    "{%- for call in message.tool_calls or [] -%}"
    "{{ '<call>' + call.function.name + ' ' + call.function.arguments + '</call>' }}"
    "{%- endfor -%}{{ eos_token }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|Assistant|>' }}"
    "{%- if enable_thinking -%}{{ '<think>' }}{%- endif -%}{%- endif -%}"
)
TEMPLATE_WITH_BOS = "{{ bos_token }}" + _BODY
TEMPLATE_WITHOUT_BOS = _BODY

_CORPUS = (
    "The brave fox ran over the hill and the river. Hello world, how are you today?",
    "Once upon a time there was a small house in the woods.",
)


def make_byte_tokenizer(
    folder: Path,
    *,
    add_bos: bool = True,
    chat_template: str | None = TEMPLATE_WITH_BOS,
    vocab_size: int = 320,
) -> Path:
    """Writes tokenizer.json and tokenizer_config.json into `folder` and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def make_byte_fallback_tokenizer(folder: Path) -> Path:
    """A Metaspace tokenizer with `<0x..>` tokens (the layout of Llama's), no chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    words += ["▁the", "▁fox", "a", "b", "c", "é", "!"]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
