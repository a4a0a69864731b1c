"""Namespaces: isolated trees of prefixes; nothing matches across two of them."""

from __future__ import annotations

from collections.abc import Iterator

from radix_mla.cache.radix_node import RadixNode

_EPHEMERAL = "\x00ephemeral:"


def ephemeral_namespace(request_id: str) -> str:
    """A namespace for one request of which nothing may stay, diagnostics included."""
    return _EPHEMERAL + request_id


def is_ephemeral(name: str) -> bool:
    return name.startswith(_EPHEMERAL)


class Namespace:
    """A root and whether it is still in the index.

    A detached namespace was flushed while in use: nothing finds it, and its pages are freed as the
    last locks on them go.
    """

    __slots__ = ("detached", "name", "root")

    def __init__(self, name: str, page_size: int) -> None:
        self.name = name
        self.detached = False
        self.root = RadixNode.root_of(self, page_size)


class Namespaces:
    """Those in the index, opened on demand and closed when empty, and the detached ones in use."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._named: dict[str, Namespace] = {}
        self._detached: set[Namespace] = set()

    @property
    def names(self) -> list[str]:
        return list(self._named)

    def roots(self) -> Iterator[RadixNode]:
        """Those in the index first."""
        for space in (*self._named.values(), *self._detached):
            yield space.root

    def find(self, name: str) -> Namespace | None:
        return self._named.get(name)

    def open(self, name: str) -> Namespace:
        space = self._named.get(name)
        if space is None:
            space = self._named[name] = Namespace(name, self._page_size)
        return space

    def detach(self, space: Namespace) -> None:
        """Out of the index; kept until nobody has a lock on it."""
        del self._named[space.name]
        space.detached = True
        self._detached.add(space)

    def close_if_empty(self, space: Namespace) -> None:
        """Forgets a namespace without nodes and locks, so that random salts leave nothing."""
        if space.root.children or space.root.lock_ref:
            return
        if space.detached:
            self._detached.discard(space)
        elif self._named.get(space.name) is space:
            del self._named[space.name]
