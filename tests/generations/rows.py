"""Rows and documents of generations, as the API makes them."""

from __future__ import annotations

from typing import Any

from completions.assemblers.chat import CHAT, ChatAssembly
from inference_site.accounts.models import ApiKey
from inference_site.core.domain.request import GenerationRequest, Message
from inference_site.runs.models import Generation
from inference_site.runs.queue import new_id
from inference_site.runs.streams.request_documents import Document


def create_generation(api_key: ApiKey, **fields: Any) -> Generation:
    """Insert a row; it waits for the model ``m`` unless the fields say otherwise."""
    row = {
        "public_id": new_id("chatcmpl-"),
        "kind": CHAT,
        "project_id": api_key.project_id,
        "api_key_id": api_key.pk,
        "model": "m",
        "request_id": "req_test",
        **fields,
    }
    return Generation.objects.create(**row)


def chat_document(generation_id: str, text: str, *, stream: bool = True) -> Document[ChatAssembly]:
    """Return the document of a chat completion that asks this of the model ``m``."""
    assembly = ChatAssembly(generation_id, 1_700_000_000, "m", stream)
    return Document(GenerationRequest("m", (Message("user", text),)), assembly)
