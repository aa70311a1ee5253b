"""Record the files of the project whose code a web or worker process runs between two signals.

Python imports this module at its start when the folder is on ``PYTHONPATH``. The first ``SIGRTMIN``
begins to note calls, the second writes what was noted to ``WALK_OUT.<process id>`` as JSON: pairs
of a file and its functions, in the order in which the files were first entered.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

_ROOT = os.environ.get("WALK_ROOT", "")
_ROLES = {"web", "worker"}


class Notes:
    """The files and functions that were entered while ``is_on``."""

    def __init__(self) -> None:
        self.is_on = False
        self._entered: dict[str, dict[str, None]] = {}

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        """Record a call (see ``sys.setprofile``)."""
        name = frame.f_code.co_filename
        if self.is_on and event == "call" and name.startswith(_ROOT):
            inside = name.removeprefix(_ROOT).lstrip("/")
            if not inside.startswith((".", "tools/")):
                self._entered.setdefault(inside, {})[frame.f_code.co_qualname] = None

    def switch(self, *_: Any) -> None:
        """Begin to record, or write the record."""
        self.is_on = not self.is_on
        if self.is_on:
            self._entered.clear()
            return
        found = [(name, list(functions)) for name, functions in self._entered.items()]
        Path(f"{os.environ['WALK_OUT']}.{os.getpid()}").write_text(json.dumps(found))


if _ROOT and _ROLES & set(sys.orig_argv):
    _notes = Notes()
    threading.setprofile(_notes.profile)
    sys.setprofile(_notes.profile)
    signal.signal(signal.SIGRTMIN, _notes.switch)  # The worker itself uses SIGUSR2.
