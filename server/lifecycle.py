"""Is the server taking work? serving → draining (SIGTERM) → stopped."""

from __future__ import annotations

import asyncio
import time

from radix_mla.errors import Overloaded


class Lifecycle:
    """Owned by the app; the signal handler of `serve` starts the drain."""

    def __init__(self, drain_timeout_s: float = 30.0) -> None:
        self._drain_timeout_s = drain_timeout_s
        self._drain_until_s: float | None = None

    @property
    def draining(self) -> bool:
        return self._drain_until_s is not None

    def drain(self) -> None:
        """From now on new work is refused; running requests go on."""
        if self._drain_until_s is None:
            self._drain_until_s = time.monotonic() + self._drain_timeout_s

    @property
    def drain_left_s(self) -> float:
        """Seconds that running requests still have."""
        if self._drain_until_s is None:
            return self._drain_timeout_s
        return max(0.0, self._drain_until_s - time.monotonic())

    def check_accepting(self) -> None:
        """Raises Overloaded (503) while draining."""
        if self.draining:
            raise Overloaded(
                "The server is shutting down. Try again later.",
                retry_after_s=max(1, int(self.drain_left_s)),
            )


class LoopLag:
    """How late the event loop runs its callbacks: the worst of the last ten seconds."""

    _INTERVAL_S = 0.25
    _KEPT = 40

    def __init__(self) -> None:
        self._lags: list[float] = [0.0] * self._KEPT
        self._place = 0

    @property
    def worst_s(self) -> float:
        return max(self._lags)

    async def watch(self) -> None:
        """Measures until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self._INTERVAL_S
            await asyncio.sleep(self._INTERVAL_S)
            self._lags[self._place] = max(0.0, loop.time() - due)
            self._place = (self._place + 1) % self._KEPT
