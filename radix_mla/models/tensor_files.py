"""The safetensors files of a checkpoint folder, seen as one name → tensor mapping."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open

from radix_mla.errors import CheckpointError
from radix_mla.models.config_reader import read_json

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"

# Element sizes of the dtypes that weights may come in, by their safetensors name.
DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1}


class TensorInfo(NamedTuple):
    """What a header says about a tensor; dtype as safetensors spells it ("BF16", "F8_E4M3")."""

    shape: tuple[int, ...]
    dtype: str
    file: str


class TensorFiles:
    """Opens every file and reads every header, so that damage shows before anything is loaded.

    Use as a context manager. Every error is a CheckpointError that names the file (and the tensor).
    """

    def __init__(self, folder: Path) -> None:
        self.tensors: dict[str, TensorInfo] = {}
        self._folder = folder
        self._handles: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            for file, expected in self._files():
                self._open(file, expected)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def read(self, name: str) -> torch.Tensor:
        """The tensor, on the CPU, in the file's dtype."""
        file = self.tensors[name].file
        try:
            tensor: torch.Tensor = self._handles[file].get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{file}: tensor {name} cannot be read: {error}") from error
        return tensor

    def _files(self) -> Iterator[tuple[str, set[str] | None]]:
        """(file, the names that the index expects in it; None without an index)."""
        if not (self._folder / _INDEX).exists():
            if not (self._folder / _SINGLE).exists():
                raise CheckpointError(f"neither {_SINGLE} nor {_INDEX} in {self._folder}")
            yield _SINGLE, None
            return
        weight_map = read_json(self._folder / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{_INDEX} has no weight_map")
        names: dict[str, set[str]] = {}
        for name, file in weight_map.items():
            # A file name and nothing else: the index must not lead out of the folder.
            if not isinstance(file, str) or Path(file).name != file:
                raise CheckpointError(f"{_INDEX}: {json.dumps(file)} is not a file name")
            names.setdefault(file, set()).add(name)
        yield from sorted(names.items())

    def _open(self, file: str, expected: set[str] | None) -> None:
        path = self._folder / file
        if not path.is_file():
            raise CheckpointError(f"{_INDEX} names {file}, which is not in {self._folder}")
        try:
            handle = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            found = set(handle.keys())
            for name in sorted(found if expected is None else expected & found):
                part = handle.get_slice(name)
                info = TensorInfo(tuple(part.get_shape()), str(part.get_dtype()), file)
                self.tensors[name] = info
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is truncated or no safetensors file: {error}") from error
        missing = sorted((expected or set()) - found)
        if missing:
            raise CheckpointError(f"{_INDEX} places {missing[0]} in {file}, which lacks it")
        self._handles[file] = handle
