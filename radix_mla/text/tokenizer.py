"""The tokenizer of a model folder: text to ids, ids to text, ids to bytes.

Wraps `transformers.AutoTokenizer`, imported only when a folder has tokenizer files. Fast
tokenizers are used through their Rust object, which takes `&self`: calls from a pool of threads
run in parallel, with the GIL released.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from radix_mla.errors import CheckpointError

_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tiktoken.model")


class Tokenizer:
    """Text to ids and back. Immutable after construction, so safe to share between threads."""

    def __init__(self, hf_tokenizer: Any) -> None:
        self.hf = hf_tokenizer
        self._rust = getattr(hf_tokenizer, "_tokenizer", None)
        self.size = len(hf_tokenizer)
        self.bos_token_id: int | None = hf_tokenizer.bos_token_id
        self.eos_token_id: int | None = hf_tokenizer.eos_token_id
        self.special_ids = self._special_ids()
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_dir(cls, path: str | Path, *, trust_remote_code: bool = False) -> Self | None:
        """The folder's tokenizer, or None when the folder has no tokenizer files.

        Raises CheckpointError, with the cause, when the files cannot be read.
        """
        folder = Path(path)
        if not any((folder / name).exists() for name in _FILES):
            return None
        from transformers import AutoTokenizer, logging  # seconds, torch included: only if needed

        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()  # it reads config.json too, and has opinions about it
        try:
            return cls(
                AutoTokenizer.from_pretrained(
                    str(folder), trust_remote_code=trust_remote_code, local_files_only=True
                )
            )
        except Exception as error:  # the loaders raise nearly every kind
            first_line = str(error).partition("\n")[0]
            raise CheckpointError(f"tokenizer in {folder} cannot be read: {first_line}") from error
        finally:
            logging.set_verbosity(verbosity)

    @cached_property
    def adds_bos(self) -> bool:
        """True when plain text gets a BOS in front by default."""
        ids = self.encode("a")
        return self.bos_token_id is not None and ids[:1] == [self.bos_token_id]

    @cached_property
    def added_ids(self) -> frozenset[int]:
        """Tokens that text is split at before anything else: they never merge with neighbours."""
        if self._rust is None:
            return frozenset(self.hf.all_special_ids)
        return frozenset(self._rust.get_added_tokens_decoder())

    @cached_property
    def added_tokens(self) -> dict[str, bool]:
        """Spelling of each added token, and whether the vocabulary calls it special."""
        if self._rust is not None:
            added = self._rust.get_added_tokens_decoder()
        else:
            added = self.hf.added_tokens_decoder
        return {token.content: bool(token.special) for token in added.values()}

    @property
    def chat_template(self) -> str | None:
        """The Jinja source; of several named templates the one called "default"."""
        template = self.hf.chat_template
        if isinstance(template, dict):
            template = template.get("default") or next(iter(template.values()), None)
        return None if template is None else str(template)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`, never truncated."""
        if self._rust is not None:
            encoding = self._rust.encode(text, add_special_tokens=add_special_tokens)
            ids: list[int] = encoding.ids
            return ids
        return list(self.hf.encode(text, add_special_tokens=add_special_tokens))

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a completion prompt: as `encode`, and exactly one BOS.

        A client that rendered a chat template itself sends a text that starts with BOS already.
        """
        ids = self.encode(text)
        if self.adds_bos and ids[1:2] == [self.bos_token_id]:
            del ids[0]
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; invalid UTF-8 becomes U+FFFD; ids outside the vocabulary are nothing."""
        if self._rust is not None:
            text: str = self._rust.decode(ids, skip_special_tokens=skip_special_tokens)
            return text
        known = [token_id for token_id in ids if token_id < self.size]
        return str(
            self.hf.decode(
                known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's spelling of the token; None outside the vocabulary."""
        if self._rust is not None:
            token: str | None = self._rust.id_to_token(token_id)
            return token
        return self.hf.convert_ids_to_tokens(token_id) if token_id < self.size else None

    def token_to_id(self, token: str) -> int | None:
        """The id of exactly this spelling; None when it is no token."""
        if self._rust is not None:
            found: int | None = self._rust.token_to_id(token)
        else:
            found = self.hf.get_vocab().get(token)
        return found

    @cached_property
    def is_byte_level(self) -> bool:
        """True when the whole decoder is ByteLevel: each token is its own run of bytes."""
        if self._rust is None:
            return False
        decoder = json.loads(self._rust.to_str()).get("decoder") or {}
        if decoder.get("type") == "Sequence":
            parts = [part.get("type") for part in decoder.get("decoders", [])]
            return parts == ["ByteLevel"]
        return bool(decoder.get("type") == "ByteLevel")

    def is_byte_fallback(self, token_id: int) -> bool:
        """True for `<0xE2>` tokens, whose text depends on their neighbours."""
        token = self.id_to_token(token_id)
        return token is not None and len(token) == 6 and token.startswith("<0x")

    def token_bytes(self, token_id: int) -> bytes:
        """The token's own bytes, special tokens included; empty outside the vocabulary."""
        cached = self._bytes.get(token_id)
        if cached is None:
            cached = self._bytes[token_id] = self._token_bytes(token_id)
        return cached

    def _token_bytes(self, token_id: int) -> bytes:
        token = self.id_to_token(token_id)
        if token is None:
            return b""
        if self.is_byte_level:
            return _byte_level_bytes(token)
        if self.is_byte_fallback(token_id):
            return bytes([int(token[3:5], 16)])
        return self.decode([token_id], skip_special_tokens=False).encode()

    def _special_ids(self) -> frozenset[int]:
        """What `decode` leaves out under skip_special_tokens."""
        if self._rust is None:
            return frozenset(self.hf.all_special_ids)
        added = self._rust.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)


def _byte_alphabet() -> dict[str, int]:
    """Printable stand-ins of the 256 bytes in byte-level vocabularies (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


_BYTE_OF = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    """As the ByteLevel decoder does: a token with any character off the table is plain UTF-8."""
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode()
