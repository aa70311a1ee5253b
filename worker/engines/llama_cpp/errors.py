"""What llama.cpp's server refuses: it says what is wrong, and not which field of the request is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from inference_site.domain.errors import EngineError, InvalidRequest
from inference_site.domain.request import GenerationRequest
from worker.engines.openai_upstream.errors import ErrorReader

_OWN_FAULT = re.compile(rb"[Cc]ompute error|decode|input batch|memory|Context size")
"""What it answers with status 500 for reasons of its own. For any other reason it does so while it
reads a request, of a chat template that refuses the messages say."""


_SCHEMA_FAULT = re.compile(
    r"Unable to generate parser.*?generation failed:\s*(?=JSON schema)", re.DOTALL
)
"""What it says before the fault of a schema: of its template, which is not at fault."""


class LlamaCppErrors(ErrorReader):
    """Reads the errors of a server of this worker."""

    def answered(
        self,
        status: int,
        headers: Mapping[str, str],
        body: bytes,
        request: GenerationRequest,
        base_url: str,
    ) -> EngineError:
        """Return what an answer with this status means (see ``ErrorReader``)."""
        if status == 500 and not _OWN_FAULT.search(body):
            status = 400
        return super().answered(status, headers, body, request, base_url)

    def _refused(
        self, message: str, error: dict[str, Any], request: GenerationRequest
    ) -> InvalidRequest:
        said = _SCHEMA_FAULT.sub("Invalid schema: ", message).strip()
        return super()._refused(said, error, request)

    def _param(self, error: dict[str, Any], request: GenerationRequest) -> str | None:
        """Return the field of the request that the message is about, as far as it shows."""
        message = str(error.get("message"))
        if "invalid tokens" in message:
            return request.subject
        if request.tools and "JSON schema" in message:
            return "tools"
        return request.constraint.param if request.constraint else request.subject
