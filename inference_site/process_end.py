"""The end of a process that was asked to stop."""

from __future__ import annotations

import logging
import os
import threading

logger = logging.getLogger(__name__)


def end_within(seconds: float, status: int) -> None:
    """End this process with ``status`` after so many seconds, unless it has ended before.

    Python waits for the threads of its pools before it exits, however long that takes, and one of
    them may wait for a server that is frozen.
    """
    timer = threading.Timer(seconds, _end, (status,))
    timer.daemon = True
    timer.start()


def _end(status: int) -> None:
    logger.error("this process did not end by itself; a thread hangs")
    logging.shutdown()
    os._exit(status)
