"""The HTTP server under our signals: the first one drains, the second one ends at once."""

from __future__ import annotations

import logging
from types import FrameType

import uvicorn

from server.service import Service

logger = logging.getLogger("radix_mla.server")


class DrainingServer(uvicorn.Server):
    """uvicorn with our signals: the first one drains, the second one ends at once."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._told_twice = False
        self._expired = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Overrides uvicorn's, which would raise the signal again after the shutdown."""
        if self._service.lifecycle.draining:
            self._told_twice = True
            self.force_exit = self.should_exit  # past the last tick: at once
        else:
            self._service.lifecycle.drain()
            logger.info(
                "draining: %d requests run, up to %.0f s; once more ends at once",
                len(self._service.generations),
                self._service.lifecycle.drain_left_s,
            )

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: ends the drain when nothing runs any more or its time is over.

        Told twice, it gives pending requests one tick for their error, then leaves.
        """
        service = self._service
        if self._told_twice:
            self.should_exit = self.force_exit = self._expired
            service.expire_generations()
            self._expired = True
            _silence_uvicorn()
        elif service.lifecycle.draining and not self.should_exit:
            if service.lifecycle.drain_left_s == 0:
                service.expire_generations()
                self.should_exit = True
                _silence_uvicorn()
            elif not service.generations:
                self.should_exit = True
        return await super().on_tick(counter) or self.should_exit


def _silence_uvicorn() -> None:
    """Handlers that are cancelled from now on are no faults: no traces of them in the log."""
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
