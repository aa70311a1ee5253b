"""What can go wrong with a generation outside its engine.

    EngineUnavailable
    ├── DocumentLost     the request was lost with the Redis that held it
    ├── StreamLost       the answer could not be sent on
    ├── ShuttingDown     the worker was stopped before the end
    ├── WorkerLost       the worker died
    ├── QueueFull        too many wait for this model already
    ├── QueueTimeout     waited too long for a slot
    └── ModelLoading     waited too long for its model to be loaded

A class's docstring is its message.

    StoppedByOperator    an operator stopped it before it ran
    HookFailed           a function of the operator failed; an error of the site, not of the engine
"""

from __future__ import annotations

from worker.engines.base import EngineUnavailable


class _Documented(EngineUnavailable):
    def __init__(self) -> None:
        super().__init__(self.__doc__)


class StoppedByOperator(Exception):
    """The request was stopped by an operator of the site."""


class HookFailed(Exception):
    """A hook raised, or returned what is no chunk."""


class DocumentLost(_Documented):
    """The request was lost with the server that held it. Please send it again."""


class StreamLost(_Documented):
    """The answer was lost with the server that carries it. Please try again."""


class ShuttingDown(_Documented):
    """The worker was stopped before the answer was complete. Please try again."""


class WorkerLost(_Documented):
    """The worker that ran this request died. Please try again."""


class QueueFull(_Documented):
    """Too many requests wait for this model. Please try again later."""


class QueueTimeout(_Documented):
    """The request waited too long for a free slot. Please try again later."""


class ModelLoading(_Documented):
    """The model is still being loaded. Please try again later."""
