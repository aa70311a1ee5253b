"""What a search of tools lists of MCP servers: what fits, in the time of one call."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from inference_site.core.domain.site_tools import ToolResult
from worker.tools.base import RESULT_FACTOR, CallContext
from worker.tools.hosted_tool_search import ToolSearch

MAX_BYTES = 1500
CONTEXT = CallContext("k", "resp_1", 1, 0.2, MAX_BYTES, lambda: False)


@dataclass
class Server:
    """A server whose list has this many bytes, and takes this long."""

    size: int = 10
    takes_s: float = 0

    def is_idempotent(self, name: str) -> bool:
        return True

    def call(self, name: str, arguments: Mapping[str, Any], context: CallContext) -> ToolResult:
        time.sleep(self.takes_s)
        return ToolResult("", {"tools": [{"name": "x" * self.size}]})


def found(paths: list[str], **servers: Server) -> ToolResult:
    search = ToolSearch(("look", *servers), servers)
    return search.call("tool_search", {"paths": paths}, CONTEXT)


def test_lists_that_do_not_fit_together_can_be_loaded_alone() -> None:
    servers = {"a": Server(1200), "b": Server(1200), "c": Server(), "huge": Server(5000)}
    result = found(["look", *servers], **servers)
    assert result.fields["names"] == ["look", "a", "c"]
    assert len(orjson.dumps(result.fields)) <= RESULT_FACTOR * MAX_BYTES
    assert result.output.splitlines()[1:] == [
        "Not loaded: b: its list of tools does not fit beside the others; load it alone",
        "Not loaded: huge: its list of tools does not fit beside the others; load it alone",
    ]
    assert found(["b"], **servers).fields["names"] == ["b"]
    alone = found(["huge"], **servers)
    assert alone.output == "Not loaded: huge: its list of tools has more than 1500 bytes"


def test_a_slow_server_leaves_what_is_there_without_it() -> None:
    result = found(["look", "slow", "late"], slow=Server(takes_s=0.25), late=Server())
    assert result.fields["names"] == ["look", "slow"]
    assert result.output.endswith(
        "Not loaded: late: the others took all the time of the call; load it alone"
    )
