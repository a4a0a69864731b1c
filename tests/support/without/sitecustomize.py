"""On PYTHONPATH of servers, their engines included, that shall not find some packages."""

import os
import sys

for _name in os.environ["TEST_WITHOUT"].split(","):
    sys.modules[_name] = None  # type: ignore[assignment]
