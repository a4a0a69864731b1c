"""Where a checkpoint lies: a local folder, or a snapshot of a hub repository. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from radix_mla.errors import CheckpointError

_HUB_FILES = ("*.json", "*.safetensors", "tokenizer*", "*.jinja", "*.model", "*.txt", "*.tiktoken")


def locate(model: str | Path) -> Path:
    """The folder of a local checkpoint, or of a hub id's snapshot (downloaded if need be).

    HF_HUB_OFFLINE is respected. Raises CheckpointError: no such folder, or not to be had.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    name = str(model)
    if path.exists() or name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise CheckpointError(f"{name} is neither a folder nor a hub id (owner/name)")
    # The package is needed for hub ids only and takes its time to import.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # of several libraries, without a common base
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise CheckpointError(
            f"{name} is no local folder and cannot be had from the hub ({reason})"
        ) from error
