"""llama.cpp's own HTTP server, for what the library offers in no other way.

xllamacpp starts one with every model, on the loopback address. It wants a key that only this
process knows, so that nobody on the host gets round the platform.
"""

from __future__ import annotations

from typing import Any

import httpx

from inference_site.domain.errors import GenerationFailed

_TIMEOUT_S = 30.0


class Loopback:
    """A client of the server of one model. Thread-safe."""

    def __init__(self, address: str, key: str) -> None:
        headers = {"Authorization": f"Bearer {key}"}
        self._client = httpx.Client(
            base_url=address, headers=headers, timeout=_TIMEOUT_S, trust_env=False
        )

    def post(self, path: str, payload: bytes) -> dict[str, Any]:
        """Return the answer: an object, which has an ``error`` when llama.cpp refused.

        Raise GenerationFailed when there is no such answer.
        """
        content = {"Content-Type": "application/json"}
        return self._ask("POST", path, content=payload, headers=content)

    def get(self, path: str) -> dict[str, Any]:
        """Return what is at this path; otherwise like ``post``."""
        return self._ask("GET", path)

    def _ask(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        try:
            answer = self._client.request(method, path, **request).json()
        except (httpx.HTTPError, ValueError) as exc:
            raise GenerationFailed(f"llama.cpp's server: {exc}") from exc
        return answer if isinstance(answer, dict) else {"error": {"message": str(answer)}}

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
