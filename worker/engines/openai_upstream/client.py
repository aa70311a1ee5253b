"""Requests to the server: kept connections, retries before the first token, cancellation."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import httpx
import orjson

from inference_site.domain.errors import EngineLoadError, EngineUnavailable, GenerationFailed
from inference_site.domain.model_spec import ModelSpec
from inference_site.domain.request import GenerationRequest
from worker.engines.base import Sink
from worker.engines.openai_upstream.chunks import ChunkReader
from worker.engines.openai_upstream.errors import ErrorReader
from worker.engines.openai_upstream.server import Server
from worker.engines.openai_upstream.transport import Cancelled, PolledTransport, pause, watching

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 10.0
_LIST_TIMEOUT_S = 10.0
_BACKOFFS_S = (0.05, 0.5)
"""Pauses before the second and the third attempt. The first is short: what fails most often is a
kept connection that the server was just closing."""
_KEEP_ALIVE_S = 4.0
"""Below the 5 seconds after which uvicorn and llama.cpp close an idle connection."""
_MOST_ERROR_BYTES = 65_536
_NAMES_SHOWN = 10

T = TypeVar("T")


class Upstream:
    """The server of one model. Thread-safe."""

    def __init__(self, spec: ModelSpec, server: Server) -> None:
        self._id, self._server = spec.id, server
        self.errors = ErrorReader(spec.id, server)
        self._has_warned = False
        headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        if server.key:
            headers["Authorization"] = f"Bearer {server.key}"
        self._client = httpx.Client(
            transport=PolledTransport(server.connections, _KEEP_ALIVE_S),
            headers={**headers, **server.headers},
            timeout=httpx.Timeout(
                server.timeout_s, connect=min(server.timeout_s, _CONNECT_TIMEOUT_S)
            ),
        )

    def find_model(self) -> str:
        """Return the model's name there: the option, else the id, else the only one there is.

        Raise EngineLoadError naming the address and the reason.
        """
        url = f"{self._server.base_url}/models"
        listed = self._listed(url)
        wanted = self._server.model or self._id
        for name in (wanted, f"{wanted}:latest"):  # The tag that Ollama lets one leave out.
            if name in listed:
                return wanted
        if self._server.model is None and len(set(listed.values())) == 1:
            return next(iter(listed.values()))
        names = sorted(set(listed.values()))
        more = ", …" if len(names) > _NAMES_SHOWN else ""
        raise EngineLoadError(
            f"Model '{self._id}': {url} lists no model '{wanted}'; it has "
            f"{', '.join(names[:_NAMES_SHOWN]) or 'none'}{more}."
        )

    def stream(self, path: str, payload: bytes, reader: ChunkReader) -> None:
        """Run a request into the reader, to its end or until it is cancelled. Raise EngineError."""
        try:
            with watching(reader):
                self._attempt(lambda: self._read(path, payload, reader), reader)
        except Cancelled:
            pass
        finally:
            reader.account()
        if reader.begun and reader.usage.is_estimate:
            self._warn_once()

    def post(
        self, url: str, payload: dict[str, Any], request: GenerationRequest, sink: Sink
    ) -> dict[str, Any]:
        """Return the server's answer, an object. Raise Cancelled or EngineError."""

        def ask() -> dict[str, Any]:
            answer = self._client.post(url, content=orjson.dumps(payload))
            if answer.status_code != 200:
                raise self.errors.answered(
                    answer.status_code, answer.headers, answer.content, request
                )
            try:
                found = answer.json()
            except ValueError as exc:
                raise GenerationFailed("The model's server sent no JSON.") from exc
            if not isinstance(found, dict):
                raise GenerationFailed("The model's server sent no JSON object.")
            return found

        with watching(sink):
            return self._attempt(ask, None)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _attempt(self, run: Callable[[], T], reader: ChunkReader | None) -> T:
        """Run it, and again if the connection fails before the sink was fed."""
        for backoff in (*_BACKOFFS_S, None):
            try:
                return run()
            except (httpx.ReadTimeout, httpx.WriteTimeout) as exc:
                raise GenerationFailed(f"The model's server sent nothing in time: {exc}.") from exc
            except (httpx.ConnectTimeout, httpx.PoolTimeout) as exc:
                raise self._unreachable(exc) from exc
            except httpx.TransportError as exc:
                if reader is not None and reader.begun:
                    raise GenerationFailed(
                        f"The model's server closed the connection: {exc}"
                    ) from exc
                if backoff is None:
                    raise self._unreachable(exc) from exc
            pause(backoff)
            if reader is not None:
                reader.restart()
        raise AssertionError("The last attempt returns or raises.")

    def _read(self, path: str, payload: bytes, reader: ChunkReader) -> None:
        url = f"{self._server.base_url}{path}"
        with self._client.stream("POST", url, content=payload) as answer:
            if answer.status_code != 200:
                body = _beginning(answer)
                raise self.errors.answered(answer.status_code, answer.headers, body, reader.request)
            if answer.headers.get("content-type", "").startswith("application/json"):
                reader.whole(answer.read())
                return
            try:
                for data in answer.iter_bytes():
                    reader.feed(data)
            except httpx.TransportError:
                if not reader.is_complete:
                    raise
            reader.end()

    def _listed(self, url: str) -> dict[str, str]:
        """Return the names of the server's models, aliases included, and whose they are."""
        try:
            patience_s = min(self._server.timeout_s, _LIST_TIMEOUT_S)
            answer = self._client.get(url, timeout=patience_s)
        except httpx.HTTPError as exc:
            raise EngineLoadError(f"Model '{self._id}': {url} cannot be reached: {exc}") from exc
        if answer.status_code != 200:
            said = self._server.without_key(answer.text[:200])
            raise EngineLoadError(
                f"Model '{self._id}': {url} answers with status {answer.status_code}: {said}"
            )
        try:
            entries = answer.json()["data"]
            names = {str(entry["id"]): str(entry["id"]) for entry in entries}
            aliases = {str(a): str(e["id"]) for e in entries for a in e.get("aliases") or ()}
        except (AttributeError, LookupError, TypeError, ValueError) as exc:
            raise EngineLoadError(f"Model '{self._id}': {url} is no list of models.") from exc
        return aliases | names

    def _unreachable(self, exc: Exception) -> EngineUnavailable:
        logger.error("model %s: %s: %s", self._id, self._server.base_url, exc)
        return EngineUnavailable(f"The server of the model '{self._id}' cannot be reached.")

    def _warn_once(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "model %s: %s reports no usage; each piece of an answer is counted as a token",
                self._id,
                self._server.base_url,
            )


def _beginning(answer: httpx.Response) -> bytes:
    """Return the body, or the beginning of a long one."""
    body = b""
    for data in answer.iter_bytes():
        body += data
        if len(body) > _MOST_ERROR_BYTES:
            break
    return body
