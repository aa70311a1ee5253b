"""Ports for what tests start.

They lie below those that the system hands out by itself, to clients and to whoever asks for any
port, as llama.cpp does in the very stack that is being started; and each test process has its own.
"""

from __future__ import annotations

import os
import socket
from itertools import count

_FIRST, _EACH = 12_000, 1_000
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_candidates = (_FIRST + _worker * _EACH + number % _EACH for number in count(os.getpid() * 37))


def free_port() -> int:
    """Return a port of the loopback address on which nothing listens, another one each time."""
    for port in _candidates:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("the candidates never end")
