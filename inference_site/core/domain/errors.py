"""Errors of a generation, inside its engine and outside of it.

    EngineError
    ├── InvalidRequest              the request is invalid (the client's fault)
    │   ├── ContextLengthExceeded
    │   ├── AnswerTooLong           the limit of the answer exceeds the rest of the context
    │   ├── ImageNotSupported       a file is an image, and the model reads none
    │   └── RequestTooLarge         larger than the quota of a project
    ├── GenerationFailed            the library failed while generating
    │   └── ConnectionLost          the model's server disconnected during the answer
    └── EngineUnavailable           the engine cannot run requests now; try again
        ├── EngineLoadError         the model could not be loaded; names the file and the reason
        ├── RateLimited             the engine accepts no more requests now
        ├── ModelServerUnreachable  the model's server does not answer; it may come back
        ├── DocumentLost            the request was lost with the Redis that held it
        ├── StreamLost              the answer could not be streamed
        ├── ShuttingDown            the worker was stopped during the answer
        ├── WorkerLost              the worker died
        ├── ModelServerLost         the process of the model died
        ├── Cancelled               its client, or a repetition of the request, cancelled it
        ├── QueueFull               too many requests wait for this model
        ├── ProjectQueueFull        this project has too many of them
        ├── RedisFull               no room for another request
        ├── ProjectQuotaReached     the project's requests and streams use too much memory
        ├── QueueTimeout            waited too long for a slot
        ├── ModelLoading            waited too long for its model to be loaded
        ├── LoadFailed              waited for its model, which could not be loaded
        └── ModelRemoved            the model was removed from the site

    StoppedByOperator               an operator stopped it before it ran
    HookFailed                      a hook of the operator failed (the site's fault)

The message of ``DocumentLost`` and the classes below it is their docstring.
"""

from __future__ import annotations


class EngineError(Exception):
    """The engine failed."""


class InvalidRequest(EngineError):
    """The engine cannot serve this request."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthExceeded(InvalidRequest):
    """The prompt leaves no room in the model's context. Both counts are tokens.

    ``is_estimated``: the number of the prompt's tokens was not counted exactly. ``message`` is that
    of a server which does not name the numbers: they are guesses then.
    """

    def __init__(
        self,
        context_length: int,
        input_tokens: int,
        param: str = "messages",
        *,
        is_estimated: bool = False,
        message: str = "",
    ) -> None:
        count = f"an estimated {input_tokens}" if is_estimated else str(input_tokens)
        super().__init__(
            message
            or f"This model's maximum context length is {context_length} tokens. "
            f"However, your {param} resulted in {count} tokens. "
            f"Please reduce the length of the {param}.",
            param=param,
        )
        self._message = message
        self.context_length = context_length
        self.input_tokens = input_tokens
        self.is_estimated = is_estimated

    def of(self, param: str) -> ContextLengthExceeded:
        """Return the same error for another field of the request."""
        return ContextLengthExceeded(
            self.context_length,
            self.input_tokens,
            param,
            is_estimated=self.is_estimated,
            message=self._message,
        )


class AnswerTooLong(InvalidRequest):
    """The limit of the answer is more than the context has left after the prompt.

    ``left`` is the number of tokens that are left; None if it is not known exactly.
    """

    def __init__(self, message: str, left: int | None = None) -> None:
        super().__init__(message, "max_tokens")
        self.left = left


class ImageNotSupported(InvalidRequest):
    """A file of the request is an image, and the model reads no images."""


class RequestTooLarge(InvalidRequest):
    """The request takes more bytes than a project may have in the queue."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__(
            f"The request takes more than the {most_bytes} bytes that a project may have in the "
            "queue."
        )


class GenerationFailed(EngineError):
    """The engine failed while generating."""


class ConnectionLost(GenerationFailed):
    """The model's server disconnected during the answer."""

    is_suspect = True


class EngineUnavailable(EngineError):
    """The engine cannot run requests now; it may later, or another worker may.

    ``retry_after_s`` is the time in seconds after which to try again, if the engine knows it.
    """

    def __init__(self, message: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineLoadError(EngineUnavailable):
    """The model could not be loaded."""

    def __init__(self, message: str | None = None, *, by_process: bool = False) -> None:
        """``by_process``: the model's process has ended itself, maybe because of a file."""
        super().__init__(message)
        self.by_process = by_process


class RateLimited(EngineUnavailable):
    """The engine accepts no more requests now."""


class ModelServerUnreachable(EngineUnavailable):
    """The server of the model does not answer. Please try again later."""

    def __init__(self, message: str | None = None, *, is_suspect: bool = False) -> None:
        """``is_suspect``: the server had the request, which may have crashed it."""
        super().__init__(message or self.__doc__)
        self.is_suspect = is_suspect


class _Documented(EngineUnavailable):
    def __init__(self) -> None:
        super().__init__(self.__doc__)


class StoppedByOperator(Exception):
    """The request was stopped by an operator of the site."""


class HookFailed(Exception):
    """A hook raised an exception, or returned something other than a chunk."""


class DocumentLost(_Documented):
    """The request was lost with the server that held it. Please send it again."""


class StreamLost(_Documented):
    """The answer was lost with the server that carries it. Please try again."""


class ShuttingDown(_Documented):
    """The worker was stopped before the answer was complete. Please try again."""


class WorkerLost(_Documented):
    """The worker that ran this request died. Please try again."""


class ModelServerLost(_Documented):
    """The process of the model ended before the answer was complete. Please try again."""

    def __init__(self, *, is_suspect: bool) -> None:
        """``is_suspect``: the process crashed, possibly because of the running request."""
        super().__init__()
        self.is_suspect = is_suspect


class Cancelled(_Documented):
    """The request was cancelled by its client, or by a repetition of it. Please try again."""


class QueueFull(_Documented):
    """Too many requests wait for this model. Please try again later."""


class ProjectQueueFull(_Documented):
    """This project has too many requests waiting for this model. Please try again later."""


class RedisFull(_Documented):
    """The queue has no room for another request now. Please try again later."""


class ProjectQuotaReached(_Documented):
    """This project has too many bytes in the queue. Please try again when some have ended."""


class QueueTimeout(_Documented):
    """The request waited too long for a free slot. Please try again later."""


class ModelLoading(_Documented):
    """The model is still being loaded. Please try again later."""


class LoadFailed(_Documented):
    """The model could not be loaded, so no worker serves it now. Please try again later."""


class ModelRemoved(_Documented):
    """The model was removed from this site while the request waited for it."""
