"""`GenerationDefaults`: what a checkpoint's generation_config.json says about sampling."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from radix_mla.models.config_reader import ConfigReader, read_json

if TYPE_CHECKING:
    from radix_mla.models.hf_config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Sampling defaults of `generation_config.json`; `None`: it says nothing.

    `eos_token_ids`: the file's ids and those of config.json, in that order, each once.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_dir(cls, path: str | Path, config: ModelConfig) -> GenerationDefaults:
        """Reads `path`/generation_config.json; a folder without one has the config's EOS ids."""
        file = Path(path) / "generation_config.json"
        if not file.exists():
            return cls(eos_token_ids=config.eos_token_ids)
        reader = ConfigReader(read_json(file), source=file.name)
        ids = (*reader.token_ids("eos_token_id"), *config.eos_token_ids)
        return cls(
            temperature=reader.optional_number("temperature"),
            top_p=reader.optional_number("top_p"),
            top_k=reader.optional_count("top_k"),
            min_p=reader.optional_number("min_p"),
            repetition_penalty=reader.optional_number("repetition_penalty"),
            eos_token_ids=tuple(dict.fromkeys(ids)),
        )
