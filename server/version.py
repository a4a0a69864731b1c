"""The version that the API shows."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def _version() -> str:
    try:
        return version("radix-mla")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "0+source"


VERSION = _version()
FINGERPRINT = f"radix-mla-{VERSION}"
