"""How many requests and WebSockets of one project a web process has open at a time.

Each takes a connection, and memory for as long as it is open, which may be an hour.
"""

from __future__ import annotations

from collections import Counter
from types import TracebackType
from typing import Self

from django.conf import settings

from inference_site.errors.api_errors import RateLimitError
from inference_site.process_tuning import max_client_connections

_requests: Counter[int] = Counter()
_websockets: Counter[int] = Counter()


class OpenRequest:
    """A request that counts for its project from the moment that this is known, until its end.

    For the event loop's thread only.
    """

    __slots__ = ("_project_id",)

    def __init__(self) -> None:
        self._project_id: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._project_id is not None:
            _end(_requests, self._project_id)
            self._project_id = None

    @property
    def is_counted(self) -> bool:
        """Whether it is known whose request it is."""
        return self._project_id is not None

    def count_for(self, project_id: int | None) -> None:
        """Count for this project, once. Raise RateLimitError if that has too many open."""
        if project_id is None or self._project_id is not None:
            return
        most = settings.CONNECTIONS_PER_PROJECT or max_client_connections() // 2
        if _requests[project_id] >= most:
            raise RateLimitError(
                f"This project has {most} requests open in this server process, which is the most "
                "that one may have. Please try again when some of them have ended."
            )
        _requests[project_id] += 1
        self._project_id = project_id


def open_websocket(project_id: int) -> None:
    """Count a WebSocket of this project. Raise RateLimitError if it may have no more."""
    most = settings.WEBSOCKETS_PER_PROJECT
    if _websockets[project_id] >= most:
        raise RateLimitError(
            f"This project has {most} WebSockets open in this server process, which is the most "
            "that one may have."
        )
    _websockets[project_id] += 1


def close_websocket(project_id: int) -> None:
    """Count a WebSocket of this project no more."""
    _end(_websockets, project_id)


def _end(counter: Counter[int], project_id: int) -> None:
    counter[project_id] -= 1
    if not counter[project_id]:
        del counter[project_id]
