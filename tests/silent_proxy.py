"""A TCP proxy that can fall silent: it keeps connections and acknowledges, but forwards nothing.

That is what a client sees of a server behind a pooler or a load balancer when the server has
vanished: no error, no answer, and no TCP time-out. After ``heal`` new connections work, and the old
ones stay dead.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path

_PIECE = 65_536

Target = Path | tuple[str, int]
"""A Unix socket, or a host and a port."""


class SilentProxy:
    """Forwards TCP connections on ``port`` to a server."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._silent = threading.Event()
        self._connections: list[_Connection] = []
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def fall_silent(self) -> None:
        """Forward nothing more of any connection, new ones included, and keep them all open."""
        with self._lock:
            self._silent.set()
            for connection in self._connections:
                connection.is_dead.set()

    def heal(self) -> None:
        """Forward new connections again."""
        with self._lock:
            self._silent.clear()

    def close(self) -> None:
        """Close everything."""
        self._listener.close()
        with self._lock:
            for connection in self._connections:
                connection.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # It is closed.
                return
            with self._lock:
                self._connections.append(_Connection(client, self._target, self._silent.is_set()))


class _Connection:
    """One connection; while ``is_dead`` it reads what comes, as a kernel does, and drops it."""

    def __init__(self, client: socket.socket, target: Target, is_dead: bool) -> None:
        self.is_dead = threading.Event()
        server = socket.socket(socket.AF_UNIX if isinstance(target, Path) else socket.AF_INET)
        if is_dead:
            self.is_dead.set()
        else:
            with contextlib.suppress(OSError):  # Then the client sees an end of file.
                server.connect(str(target) if isinstance(target, Path) else target)
        self._sockets = (client, server)
        ways = ((client, server),) if is_dead else ((client, server), (server, client))
        for source, sink in ways:
            threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(_PIECE):
                if not self.is_dead.is_set():
                    sink.sendall(piece)
        if not self.is_dead.is_set() or source is self._sockets[0]:
            self.close()

    def close(self) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
