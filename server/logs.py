"""Log lines for people (console) or collectors (one JSON object a line), without any prompt."""

from __future__ import annotations

import json
import logging
import sys
from typing import Literal


class JsonFormatter(logging.Formatter):
    """time, level, logger, message, and the trace where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure(level: str, form: Literal["console", "json"], *, access_log: bool) -> None:
    """One handler on stderr for everything of this process."""
    handler = logging.StreamHandler(sys.stderr)
    if form == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("radix_mla").setLevel(level.upper())
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    access = logging.INFO if access_log else logging.WARNING
    logging.getLogger("uvicorn.access").setLevel(access)
