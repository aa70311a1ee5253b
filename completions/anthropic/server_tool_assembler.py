"""Messages whose tools the site runs: model → calls → results → model, in one message.

A call is a block ``server_tool_use`` or ``mcp_tool_use``, and its result the block after those of
its turn. A turn that calls a tool of the client ends the message, after the calls of the site. When
the site's bound on calls is reached, the message ends with ``pause_turn``: the client sends it back
to have it continued.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from django.conf import settings
from pydantic import TypeAdapter

from completions.anthropic.assembler import Block, MessageAssembler, MessageAssembly
from completions.anthropic.server_tools import (
    CITED_FROM_CHARS,
    ServerTools,
    SiteFunction,
    seal_result,
)
from completions.anthropic.wire import MessagesUsage, ServerToolUsage, StopReason
from inference_site.core.domain.deltas import Delta, Finish, TextDelta, ToolCallDelta
from inference_site.core.domain.errors import InvalidRequest
from inference_site.core.domain.request import MAX_FUNCTIONS, GenerationRequest, Tool
from inference_site.core.domain.site_tools import (
    SEARCH_REFUSED,
    SiteCall,
    Source,
    ToolResult,
    WebResult,
    find_citations,
)
from inference_site.core.storage.cipher import seal
from inference_site.gateway.request_fields.mcp import listed_functions
from inference_site.gateway.request_fields.web_search import WEB_SEARCH
from inference_site.mcp.access import LIST_TOOLS
from inference_site.runs.queue import new_id
from inference_site.runs.streams.batches import Sent
from inference_site.runs.tool_calls.turns import TurnCall, Turns

_CITED_CHARS = 150
"""The most characters of a result that a citation repeats, as in Anthropic's API."""
_TOOLS = TypeAdapter(list[Tool])
_ROUTES = TypeAdapter(dict[str, SiteFunction])


def message_assembler(assembly: MessageAssembly) -> MessageAssembler:
    """Return the assembler of a message."""
    return ServerToolAssembler(assembly) if assembly.site_tools else MessageAssembler(assembly)


class ServerToolAssembler(MessageAssembler):
    """Assembles a message with calls of the site (see ``Assembler.calls``)."""

    def __init__(self, assembly: MessageAssembly) -> None:
        super().__init__(assembly)
        self._routes = dict(assembly.routes)
        sources = [Source(one.url, one.title) for one in assembly.results]
        self._turns = Turns(settings.TOOL_CALLS_MAX, sources)
        self._cited = {one.url: _beginning(one.text) for one in assembly.results}
        self._listings = {place: self._turns.next_number() for place in assembly.unlisted}
        """The numbers of the calls that list tools, before the first turn of the model."""
        self._has_begun = not self._listings
        self._listed: list[tuple[int, list[Any]]] = []
        self._unlisted = ""
        """Why the tools of a server are not known."""
        self._discovered: list[Tool] = []
        self._searches = self._searched = 0
        """How many searches the model has asked for, and how many were made."""
        self._is_paused = False
        self._begin_turn()

    def _begin_turn(self) -> None:
        self._calls: dict[int, TurnCall] = {}
        """The calls of the site by their places in the turn."""
        self._ignored: set[int] = set()
        """The places of those beyond the bound."""
        self._client_calls = 0

    @property
    def sources(self) -> Sequence[Source]:
        """See ``Assembler``."""
        return self._turns.sources

    # --- What the model says ----------------------------------------------------------------------

    def feed(self, delta: Delta) -> Sequence[bytes]:
        """Take the next delta; return the events it makes."""
        self._turns.take(delta)
        match delta:
            case TextDelta(text) if self._turns.sources:
                return self._shown(self._cited_text(text))
            case ToolCallDelta():
                begins = delta.id is not None and delta.name is not None
                if begins and delta.name in self._routes and not self._turns.may_call:
                    self._ignored.add(delta.call)
                if delta.call in self._ignored:
                    return ()
                frames = super().feed(delta)
                if call := self._calls.get(delta.call):
                    call.arguments += delta.arguments
                return frames
            case Finish():
                super().feed(delta)
                return self._shown(self._close() if self.calls() else [])
        return super().feed(delta)

    def new_call(self, delta: ToolCallDelta) -> Block | None:
        """Return the block of the call that the delta begins, of the site or of the client."""
        block = super().new_call(delta)
        if block is None or delta.name is None:
            return None
        route = self._routes.get(delta.name)
        if route is None:
            self._client_calls += 1
            return block
        name, server = route.name, route.server
        if server is None:
            self._searches += 1
            most = self._assembly.max_searches
            if most is not None and self._searches > most:
                name = SEARCH_REFUSED
        call_id = new_id("srvtoolu_" if server is None else "mcptoolu_")
        call = self._turns.begin_call(route.place, name, call_id, delta.name)
        self._calls[delta.call] = call
        if server is None:
            return Block("server_tool_use", delta.call, id=call_id, name=WEB_SEARCH)
        return Block("mcp_tool_use", delta.call, id=call_id, name=name, server_name=server)

    def _cited_text(self, text: str) -> list[bytes]:
        """Add a piece of text: after a line that cites sources, a new block begins.

        So a citation belongs to its line, and not to the whole answer.
        """
        if "\n" not in text:
            return self._piece("text", text, "text_delta") if text else []
        frames = list[bytes]()
        is_going_on = self._is_open and self._blocks[-1].kind == "text"
        before, start = self._blocks[-1].text if is_going_on else "", 0
        for newline in (place for place, char in enumerate(text) if char == "\n"):
            if self._cited_pages(before + text[start:newline]):
                if newline > start:
                    frames += self._piece("text", text[start:newline], "text_delta")
                frames += self._close()
                before, start = "", newline
        return frames + (self._piece("text", text[start:], "text_delta") if text[start:] else [])

    def _cited_pages(self, text: str) -> dict[str, str]:
        """Return the URLs that a text cites, each with its title."""
        if "]" not in text and "://" not in text:
            return {}
        found = find_citations(text, self._turns.sources)
        return {one.source.url: one.source.title for one in found if one.source.url}

    def _last_deltas(self, block: Block) -> Iterator[dict[str, Any]]:
        """Add what a block has at its end; yield its deltas."""
        cited = self._cited_pages(block.text) if block.kind == "text" else {}
        if cited:
            citations = [
                {
                    "type": "web_search_result_location",
                    "url": url,
                    "title": title,
                    "cited_text": self._cited.get(url, ""),
                    "encrypted_index": seal(url, self._assembly.project_id),
                }
                for url, title in cited.items()
            ]
            block.fields["citations"] = citations
            yield from ({"type": "citations_delta", "citation": one} for one in citations)
        yield from super()._last_deltas(block)

    # --- What the site does -----------------------------------------------------------------------

    def calls(self) -> Sequence[SiteCall]:
        """Return the lists of tools that are missing, or the calls of the turn that has ended."""
        if self._listings:
            return [
                SiteCall(number, place, LIST_TOOLS, "{}")
                for place, number in self._listings.items()
            ]
        return [] if self._is_cut else self._turns.waiting

    @property
    def _is_cut(self) -> bool:
        """Whether the turn has ended before the model was done."""
        reason = super().stop_reason
        return reason in ("max_tokens", "refusal", "stop_sequence")

    def add_result(self, result: ToolResult) -> Sequence[bytes]:
        """Take the result of the first of the ``calls``; return the events of its block."""
        if self._listings:
            place = next(iter(self._listings))
            del self._listings[place]
            label = self._assembly.site_tools[place]["server_label"]
            if result.is_error:
                self._unlisted = (
                    f"the tools of the MCP server '{label}' are not known: {result.output}"
                )
                return ()
            tools = result.fields["tools"]
            self._listed.append((place, tools))
            if not self._assembly.shows_listings:
                return ()
            names = ("name", "description", "input_schema")
            shown = [{name: tool.get(name) for name in names} for tool in tools]
            listing = {"mcp_server_name": label, "tools": shown}
            return self._shown(self._whole("mcp_tool_listing", **listing))
        call = self._turns.add_result(result)
        fields: dict[str, Any] = {"tool_use_id": call.id}
        if self._routes[call.name].server is not None:
            fields |= {
                "is_error": result.is_error,
                "content": [{"type": "text", "text": result.output}],
            }
            return self._shown(self._whole("mcp_tool_result", **fields))
        return self._shown(
            self._whole("web_search_tool_result", **fields, content=self._search_result(result))
        )

    def _search_result(self, result: ToolResult) -> list[dict[str, Any]] | dict[str, Any]:
        if result.is_error:
            code = result.fields.get("error_code", "unavailable")
            return {"type": "web_search_tool_result_error", "error_code": code}
        self._searched += 1
        results = [WebResult(**one) for one in result.fields["results"]]
        for one in results:
            self._cited.setdefault(one.url, _beginning(one.text))
        return [
            {
                "type": "web_search_result",
                "url": one.url,
                "title": one.title,
                "encrypted_content": seal_result(one, self._assembly.project_id),
                "page_age": None,
            }
            for one in results
        ]

    def _whole(self, kind: str, **fields: Any) -> list[bytes]:
        """Add a block that has no deltas."""
        return [*self._open(Block(kind, **fields)), *self._close()]

    # --- From turn to turn ------------------------------------------------------------------------

    def next_request(self, request: GenerationRequest) -> GenerationRequest | None:
        """Return the request of the next turn (see ``Assembler``); the first one may follow lists.

        Raise InvalidRequest if the tools of a server are not known.
        """
        following: GenerationRequest | None = request
        must_call = request.must_call
        if not self._has_begun:
            self._has_begun = True
            self._discover(request)
        elif self._client_calls or self._is_cut or not self._turns.calls:
            return None
        elif not self._turns.may_call:
            self._is_paused = True
            return None
        else:
            must_call = False
            following = self._turns.next_request(request)
            self._begin_turn()
        if following is None:
            self._end = Finish("length")
            return None
        tools = (*request.tools, *self._discovered)
        return replace(following, tools=tools, must_call=must_call and bool(tools))

    def _discover(self, request: GenerationRequest) -> None:
        """Offer the tools that were listed, beside those of the request."""
        if self._unlisted:
            raise InvalidRequest(f"Invalid 'mcp_servers': {self._unlisted}", "mcp_servers")
        taken = frozenset(tool.name for tool in request.tools)
        offered = ServerTools(routes=self._routes, taken=taken)
        for place, tools in self._listed:
            options = self._assembly.site_tools[place]
            for function in listed_functions(tools, options):
                self._discovered.append(offered.add(function, place, options["server_label"]))
        if len(taken) + len(self._discovered) > MAX_FUNCTIONS:
            raise InvalidRequest(
                f"Invalid 'tools': there are more than {MAX_FUNCTIONS} functions, those of MCP "
                "servers included.",
                "tools",
            )

    @property
    def stop_reason(self) -> StopReason | None:
        """Why the answer has ended."""
        return "pause_turn" if self._is_paused else super().stop_reason

    def usage(self) -> MessagesUsage:
        """Return the counts, with the searches if the model may search."""
        usage = super().usage()
        if all(route.server is not None for route in self._assembly.routes.values()):
            return usage
        searches = ServerToolUsage(web_search_requests=self._searched)
        return usage.model_copy(update={"server_tool_use": searches})

    def save(self) -> Mapping[str, Any]:
        """Return the blocks and the turns so far (see ``Assembler``); nothing before the first."""
        if not self._has_begun:
            return {}
        blocks = [
            {"kind": one.kind, "call": one.call, "fields": one.fields, "text": one.text}
            for one in self._blocks
        ]
        return {
            "blocks": blocks,
            "turns": self._turns.save(),
            "client_calls": self._client_calls,
            "discovered": _TOOLS.dump_python(self._discovered, mode="json"),
            "routes": _ROUTES.dump_python(self._routes, mode="json"),
            "cited": self._cited,
            "searches": [self._searches, self._searched],
        }

    def restart(self, sent: Sent, saved: Mapping[str, Any] | None = None) -> Sequence[bytes]:
        """Continue with the calls of the last turn; nothing of a whole answer was sent."""
        if not saved:
            return ()
        for one in saved["blocks"]:
            block = Block(one["kind"], one["call"], **one["fields"])
            block.pieces = [one["text"]]
            self._blocks.append(block)
        self._listings.clear()
        self._has_begun = True
        self._turns.restore(saved["turns"])
        self._client_calls = saved["client_calls"]
        self._discovered = _TOOLS.validate_python(saved["discovered"])
        self._routes = _ROUTES.validate_python(saved["routes"])
        self._cited = dict(saved["cited"])
        self._searches, self._searched = saved["searches"]
        self._end = Finish("tool_calls")
        return ()


def _beginning(text: str) -> str:
    """Return the beginning of a text in one line, for citations."""
    return " ".join(text[:CITED_FROM_CHARS].split())[:_CITED_CHARS]
