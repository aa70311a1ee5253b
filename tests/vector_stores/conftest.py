"""A site whose chat model is played, and whose embedding model is the demo's."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import openai
import pytest

from tests.conftest import ToolsStack
from tests.served_stack import ServedStack
from tests.upstream_server import UpstreamServer

FJORDS = "The Sognefjord in Norway is 205 km long. It is the longest fjord of the country."
TEA = "Green tea is brewed with water of 80 degrees Celsius for two minutes."
INVOICES = "Invoice 4711 was paid on the third of May. The reference is QX-77."


@dataclass(frozen=True)
class ReadingSite:
    """A running site and the server of its chat model."""

    stack: ServedStack
    model: UpstreamServer
    client: openai.OpenAI

    def file(self, name: str, content: str | bytes) -> str:
        """Upload a file; return its id."""
        data = content.encode() if isinstance(content, str) else content
        upload = (name, io.BytesIO(data))
        return self.client.files.create(file=upload, purpose="assistants").id

    def store(self, **files: str | bytes) -> Any:
        """A store with these files, whose names have a dot for the underscore."""
        ids = [self.file(name.replace("_", "."), text) for name, text in files.items()]
        store = self.client.vector_stores.create(name="library")
        if ids:
            self.client.vector_stores.file_batches.create_and_poll(
                store.id, file_ids=ids, poll_interval_ms=100
            )
        return self.client.vector_stores.retrieve(store.id)


@pytest.fixture(scope="package")
def site(tools_stack: ToolsStack) -> ReadingSite:
    return ReadingSite(tools_stack.stack, tools_stack.reader, tools_stack.stack.client())
