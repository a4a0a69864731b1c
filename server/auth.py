"""API keys: who may call, and which namespace of the cache a caller lives in."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import Scope

from server.errors import HttpError

OPEN_PATHS = frozenset(("/health", "/ready", "/metrics"))


class Keyring:
    """The accepted keys, kept as digests; comparison takes the same time for every key."""

    def __init__(self, keys: Sequence[str], admin_keys: Sequence[str] = ()) -> None:
        self._digests = [(_digest(key), False) for key in keys]
        self._digests += [(_digest(key), True) for key in admin_keys]

    @property
    def required(self) -> bool:
        return bool(self._digests)

    def identify(self, scope: Scope) -> tuple[str, bool]:
        """(tenant, is admin) of a request; ("", True) when no keys are set.

        Raises HttpError 401.
        """
        if not self._digests:
            return "", True
        presented = _presented(scope)
        if presented is None:
            raise _unauthorized("No API key: send `Authorization: Bearer KEY`.", "missing_api_key")
        digest = _digest(presented)
        tenant, is_admin = "", False
        for known, admin in self._digests:  # all of them, whichever matches
            if hmac.compare_digest(known, digest):
                tenant, is_admin = known.hex()[:16], admin
        if not tenant:
            raise _unauthorized("The API key is not valid.", "invalid_api_key")
        return tenant, is_admin


def namespace_of(tenant: str, cache_salt: str, *, cache_scope: str) -> str:
    """The cache's namespace. "" (no salt) is the shared one under `--cache-scope global`.

    Under `key` the server derives the scope from the API key, so a salt that somebody else
    guesses does not reach another tenant's rows.
    """
    if cache_scope == "key":
        return f"key:{tenant}:{cache_salt}"
    return cache_salt


def _presented(scope: Scope) -> bytes | None:
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = bytes(value).partition(b" ")
            if scheme.lower() == b"bearer" and key.strip():
                return key.strip()
        if name == b"x-api-key":
            return bytes(value).strip()
    return None


def _digest(key: str | bytes) -> bytes:
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).digest()


def _unauthorized(message: str, code: str) -> HttpError:
    return HttpError(401, message, code=code, headers={"www-authenticate": "Bearer"})
