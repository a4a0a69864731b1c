"""Progress of the engine's start: bars on a terminal, a log line a quarter elsewhere."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

logger = logging.getLogger("radix_mla.server")


class Report(Protocol):
    """Called with (stage, done, total)."""

    def __call__(self, stage: str, done: int, total: int) -> None: ...


@contextmanager
def load_progress() -> Iterator[Report]:
    """Shows the stages of the start on stderr."""
    if not sys.stderr.isatty():
        yield _log_lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        tasks: dict[str, TaskID] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=max(1, total))
            progress.update(tasks[stage], completed=done, total=max(1, total))

        yield report


def _log_lines() -> Report:
    told: dict[str, int] = {}

    def report(stage: str, done: int, total: int) -> None:
        quarter = 4 * done // max(1, total)
        if quarter > told.get(stage, 0) or (quarter == 4 and stage not in told):
            told[stage] = quarter
            logger.info("loading: %s %d%%", stage, 25 * quarter)

    return report
