"""One choice of a stream: from the choices of the server's chunks to deltas."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import orjson

from inference_site.catalogue.engines.openai_upstream import Flavor
from inference_site.core.domain.deltas import (
    Delta,
    Finish,
    FinishReason,
    ReasoningDelta,
    RefusalDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
)
from inference_site.core.domain.errors import GenerationFailed
from inference_site.core.domain.request import GenerationRequest
from worker.engines.chat.tools import forced_reader, new_call_id
from worker.engines.texts import StopTexts

_FAILURES = ("abort", "error", "insufficient_system_resource", "network_error")
_LIMITS = ("length", "max_tokens", "model_context_window_exceeded", "model_length")
_FILTERS = ("content_filter", "safety", "sensitive")
"""Reasons of OpenAI's API and of others, among them Mistral's, DeepSeek's, Zhipu's and Gemini's."""
_UNLIKELY = -9999.0
"""The log probability of OpenAI's API for a token that is very unlikely."""
_NOTHING: list[Delta] = []


def must_find_stops(request: GenerationRequest, flavor: Flavor) -> bool:
    """Whether the answer is ended at stop texts here, and the server is not sent them.

    llama.cpp returns one log probability for all tokens that it has held back because a stop text
    may begin there.
    """
    if request.must_call or request.token_ids or request.top_logprobs is None:
        return False
    return flavor.joins_held_tokens and bool(request.stop)


class ChoiceReader:
    """A fold over the choices of one index.

    The text of a call that is forced by a schema is read as a call (``ForcedCall``). A server that
    names tokens has no stop tokens: the text is cut here, before the first of them.
    """

    def __init__(self, request: GenerationRequest, index: int, flavor: Flavor) -> None:
        self._request, self._index = request, index
        self._top_logprobs = request.top_logprobs
        self._must_call = request.must_call
        by_text = flavor.forces_by_schema or request.forced_grammar is not None
        self._forced = forced_reader(request, index) if request.must_call and by_text else None
        is_bound = request.must_call or request.only_tools
        self._calls = CallReader(
            index,
            tools=[tool.name for tool in request.tools],
            only_tools=is_bound,
            parallel=request.parallel_tool_calls,
        )
        self._held: tuple[TokenLogprob, ...] = ()
        self._ahead = 0
        """Bytes of the text that came out, less those of its entries, where stop texts are cut."""
        self._stop_ids = frozenset(request.stop_token_ids if flavor.names_tokens else ())
        self._ends_at_stop = must_find_stops(request, flavor)
        cuts_text = flavor.ends_after_stop and request.stop and not request.echo
        self._stops = StopTexts(request.stop) if cuts_text or self._ends_at_stop else None
        self._stops_of_thoughts = StopTexts(request.stop) if self._ends_at_stop else None
        self.begun = self.finished = self.is_cut = False

    def feed(self, choice: dict[str, Any]) -> list[Delta]:
        """Return the deltas of one choice of a chunk.

        Raise GenerationFailed for a choice that the server aborted, and KeyError, TypeError or
        AttributeError for a malformed one.
        """
        self.begun = True
        if self.finished:
            return _NOTHING
        delta = choice.get("delta")
        if delta is None:  # A completion has its text in place of a delta.
            delta = choice.get("message") or {"content": choice.get("text")}
        if self._stop_ids and (cut := find_token_stop(self._stop_ids, choice)):
            self.is_cut, delta = True, cut.shorten(delta)
            ended = {"finish_reason": "stop", "stop_reason": cut.token}
            choice = {**choice, **ended, "logprobs": {"content": cut.before}}
        deltas: list[Delta] = []
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        text = delta.get("content")
        if isinstance(text, list):
            thoughts, text = _read_parts(text)
            reasoning = reasoning or thoughts
        if reasoning:
            deltas += self._reasoning(_checked(reasoning))
        if self._top_logprobs is not None and (wire := choice.get("logprobs")):
            self._hold(wire, bool(reasoning))
        if text:
            deltas += [*self._held_reasoning(), *self._text(_checked(text))]
        if self._ends_at_stop and self._found_stop:
            self.is_cut = True
            choice = {**choice, "finish_reason": "stop"}
        if refusal := delta.get("refusal"):
            deltas.append(RefusalDelta(_checked(refusal), self._index))
        if calls := delta.get("tool_calls"):
            deltas += self._calls.feed(calls)
        if reason := choice.get("finish_reason"):
            deltas += self.finish(reason, choice)
        return deltas

    def finish(self, reason: str, choice: dict[str, Any]) -> list[Delta]:
        """Return the deltas of the end. Raise GenerationFailed if a required call is missing."""
        self.finished = True
        # Gateways to Gemini also send "MAX_TOKENS", "FinishReason.MAX_TOKENS" and
        # "content_filter: SAFETY".
        known = str(reason).lower().removeprefix("finishreason.").partition(":")[0]
        if known in _FAILURES:
            raise GenerationFailed(f"The model's server gave up (finish reason '{known}').")
        calls = self._calls.finish()
        end = Finish(self._finish_reason(known), self._index, self._stop(choice))
        held = self._stops.end() if self._stops is not None else ""
        entries = self._held if held else ()
        is_text_chat = self._request.operation == "chat" and not self._must_call
        if is_text_chat and end.reason == "stop" and end.stop is None:
            # vLLM sends the entry of the token that ends a chat.
            entries = tuple(entry for entry in self._held if entry.token)
        rest = [TextDelta(held, self._index, entries)] if held or entries else _NOTHING
        return [*self._held_reasoning(), *rest, *calls, end]

    def _hold(self, wire: dict[str, Any], is_reasoning: bool) -> None:
        """Keep the entries for the next text: a token inside a character comes without text."""
        if is_reasoning:
            self._held = ()
            return
        # The first token of a prompt has no log probability. Of others, null is minus infinity.
        unknown = math.nan if self._request.echo else _UNLIKELY
        # With ``logprob_token_ids`` the server returns the entries of these tokens: keep all.
        top = None if "logprob_token_ids" in self._request.extensions else self._top_logprobs
        entries = _read_logprobs(wire, top, unknown)
        if self._request.tokens_as_ids:
            entries = tuple(entry.named_by_id() for entry in entries)
        self._held += entries

    def _reasoning(self, thoughts: str) -> list[Delta]:
        if self._stops_of_thoughts is not None:
            thoughts = self._stops_of_thoughts.feed(thoughts)
        return [ReasoningDelta(thoughts, self._index)] if thoughts else _NOTHING

    def _held_reasoning(self) -> list[Delta]:
        held = self._stops_of_thoughts.end() if self._stops_of_thoughts is not None else ""
        return [ReasoningDelta(held, self._index)] if held else _NOTHING

    def _text(self, text: str) -> list[Delta]:
        if self._forced is not None:
            return list(self._forced.feed(text))
        if self._must_call:
            return _NOTHING  # Drops text beside the required call.
        if self._stops is None:
            logprobs, self._held = self._held, ()
        else:
            text, logprobs = self._before_stop(self._stops, text)
        return [TextDelta(text, self._index, logprobs)] if text or logprobs else _NOTHING

    def _before_stop(self, stops: StopTexts, text: str) -> tuple[str, tuple[TokenLogprob, ...]]:
        """Return what can be no part of a stop text, and the entries of tokens that begin there.

        The others are held back with their text.
        """
        if stops.found:
            return "", ()
        text = stops.feed(text)
        self._ahead += len(text.encode())
        count = 0
        while self._ahead > 0 and count < len(self._held):
            self._ahead -= len(self._held[count].text_bytes)
            count += 1
        if not stops.found and not stops.is_holding:  # The bytes of some servers are not exact.
            self._ahead, count = 0, len(self._held)
        entries, self._held = self._held[:count], self._held[count:]
        return text, entries

    @property
    def _found_stop(self) -> str | None:
        """The stop text that was found here, in the reasoning or in the text."""
        found = (stops.found for stops in (self._stops_of_thoughts, self._stops) if stops)
        return next(filter(None, found), None)

    def _finish_reason(self, reason: str) -> FinishReason:
        if self._found_stop:
            return "stop"
        if reason in _LIMITS:
            return "length"
        if reason in _FILTERS:
            return "content_filter"
        if self._forced is not None:
            return "tool_calls" if self._forced.is_complete else "length"
        if self._calls.any:
            # A stop text may have cut calls, several of them if they came in turns; an incomplete
            # call is no call.
            is_whole = not self._request.stop or self._calls.are_complete
            return "tool_calls" if is_whole else "length"
        if self._must_call:
            raise GenerationFailed("The model's server made no call, though one was required.")
        return "stop"

    def _stop(self, choice: dict[str, Any]) -> str | int | None:
        """Return the stop text or token of the request that ended the choice, if it is known."""
        if found := self._found_stop:
            return found
        stop = choice.get("stop_reason", choice.get("matched_stop"))
        stops = (*self._request.stop, *self._request.stop_token_ids)
        return stop if isinstance(stop, str | int) and stop in stops else None


def _checked(text: Any) -> str:
    if not isinstance(text, str):
        raise TypeError(f"a text is a {type(text).__name__}")
    return text


def _read_parts(parts: list[dict[str, Any]]) -> tuple[str, str]:
    """Return the reasoning and the text of a content in parts, as Mistral's API sends it.

    Parts of other types, such as references, are left out. Raise AttributeError or TypeError.
    """
    reasoning = text = ""
    for part in parts:
        match part.get("type"):
            case "text":
                text += _checked(part.get("text"))
            case "thinking":
                thoughts = part.get("thinking")
                if isinstance(thoughts, list):
                    _, thoughts = _read_parts(thoughts)
                reasoning += _checked(thoughts)
    return reasoning, text


def _read_logprobs(
    wire: dict[str, Any], top: int | None, unknown: float
) -> tuple[TokenLogprob, ...]:
    """Return the entries of a chunk, each with its ``top`` likeliest tokens; None keeps all.

    ``unknown`` replaces a log probability that is null. Raise KeyError or TypeError.
    """
    if "content" in wire:
        return tuple(_entry(entry, top, unknown) for entry in wire["content"] or ())
    tokens = wire.get("tokens") or ()
    others = wire.get("top_logprobs") or [{}] * len(tokens)
    entries = []
    for token, logprob, alternatives in zip(
        tokens, wire.get("token_logprobs") or (), others, strict=False
    ):
        known = {
            name: _UNLIKELY if value is None else value
            for name, value in (alternatives or {}).items()
        }
        ranked = sorted(known.items(), key=lambda item: -item[1])[:top]
        likeliest = tuple(_token(*pair) for pair in ranked)
        entries.append(_token(token, unknown if logprob is None else logprob, likeliest))
    return tuple(entries)


def _entry(entry: dict[str, Any], top: int | None, unknown: float = _UNLIKELY) -> TokenLogprob:
    # vLLM lists the sampled token first, so the likeliest are found by sorting.
    ranked = sorted(
        entry.get("top_logprobs") or (),
        key=lambda other: math.inf if other["logprob"] is None else -other["logprob"],
    )[:top]
    others = tuple(_entry(other, 0) for other in ranked)
    text_bytes, logprob = entry.get("bytes"), entry["logprob"]
    logprob = unknown if logprob is None else logprob
    if text_bytes is None:
        return _token(entry["token"], logprob, others)
    return TokenLogprob(entry["token"], logprob, bytes(text_bytes), others, entry.get("id"))


def _token(token: str, logprob: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
    return TokenLogprob(token, logprob, token.encode(), top)


@dataclass(slots=True, eq=False)
class _Call:
    """One call; ``number`` is set once its first delta, which needs the name, was returned."""

    id: str | None = None
    name: str = ""
    number: int | None = None
    arguments: list[str] = field(default_factory=list)

    def is_complete(self) -> bool:
        """Whether the arguments are valid JSON."""
        try:
            orjson.loads("".join(self.arguments))
        except orjson.JSONDecodeError:
            return False
        return True


class CallReader:
    """A fold over the ``tool_calls`` of the deltas of one choice.

    Servers may send the arguments of several calls in turns. The deltas of a call follow each
    other: a call waits until the arguments of the one before it are complete, or the choice ends.
    A call whose name is the beginning of another tool's waits for its arguments: the name may come
    in pieces. Without ``parallel``, calls after the first are dropped: a server may ignore the
    field. So are calls of other tools than ``tools`` with ``only_tools``. A call with the id of
    another one gets an id of its own, since results name their calls by it.
    """

    def __init__(
        self, index: int, *, tools: Collection[str], only_tools: bool, parallel: bool
    ) -> None:
        self._index, self._tools = index, tools
        self._only_tools, self._parallel = only_tools, parallel
        self._calls: list[_Call] = []
        self._by_index: dict[int, _Call] = {}
        self._begun = 0
        self._ids = set[str]()
        self._open: _Call | None = None
        self._waiting: list[_Call] = []
        self._named_in_part: _Call | None = None

    @property
    def any(self) -> bool:
        """Whether there is a call."""
        return self._begun > 0

    @property
    def are_complete(self) -> bool:
        """Whether the arguments of all calls are complete."""
        return all(call.is_complete() for call in self._calls if call.number is not None)

    def feed(self, pieces: list[dict[str, Any]]) -> list[ToolCallDelta]:
        """Take the calls of one chunk. Raise TypeError or AttributeError if they are malformed."""
        deltas: list[ToolCallDelta] = []
        for piece in pieces:
            function = piece.get("function") or {}
            name, arguments = str(function.get("name") or ""), function.get("arguments")
            if not isinstance(arguments, str):
                arguments = "" if arguments is None else orjson.dumps(arguments).decode()
            index, call_id = piece.get("index"), piece.get("id") or None
            call = self._known(index, call_id, name)
            if call is None:
                call = _Call()
                self._calls.append(call)
                if index is not None:
                    self._by_index[index] = call
            call.id = call.id or (call_id and str(call_id))
            if name != call.name:
                call.name += name
            call.arguments.append(arguments)
            if call is self._open:
                deltas += [self._delta(call, arguments)] if arguments else []
            elif call.number is None and call.name and call not in self._waiting:
                self._waiting.append(call)
            elif call is not self._named_in_part:
                # It waits for its name or its turn, or its arguments were complete before.
                continue
            self._named_in_part = call if self._lacks_rest(call) else None
            while self._waiting and self._waiting[0] is not self._named_in_part:
                if self._open is not None and not self._open.is_complete():
                    break
                deltas += self._begin(self._waiting.pop(0))
        return deltas

    def finish(self) -> list[ToolCallDelta]:
        """Return the calls that waited, and empty objects for calls without arguments."""
        deltas = self._end()
        while self._waiting:
            deltas += [*self._begin(self._waiting.pop(0)), *self._end()]
        return deltas

    def _begin(self, call: _Call) -> list[ToolCallDelta]:
        if self._begun and not self._parallel:
            return []
        if self._only_tools and call.name not in self._tools:
            return []
        self._open, call.number, self._begun = call, self._begun, self._begun + 1
        held = "".join(call.arguments)
        shown_id = call.id if call.id and call.id not in self._ids else new_call_id()
        self._ids.add(shown_id)
        first = ToolCallDelta(call.number, "", shown_id, call.name, self._index)
        return [first, self._delta(call, held)] if held else [first]

    def _end(self) -> list[ToolCallDelta]:
        """Return an empty object if the open call came without arguments."""
        if self._open is None or "".join(self._open.arguments):
            return []
        self._open.arguments.append("{}")
        return [self._delta(self._open, "{}")]

    def _delta(self, call: _Call, arguments: str) -> ToolCallDelta:
        assert call.number is not None
        return ToolCallDelta(call.number, arguments, index=self._index)

    def _lacks_rest(self, call: _Call) -> bool:
        """Whether the rest of the call's name may follow."""
        has_begun = call.number is not None or any(call.arguments)
        longer = (tool for tool in self._tools if tool != call.name)
        return not has_begun and any(tool.startswith(call.name) for tool in longer)

    def _known(self, index: int | None, call_id: str | None, name: str) -> _Call | None:
        """Return the call that a piece continues; None if the piece begins another one."""
        if index is not None:
            known = self._by_index.get(index)
        elif call_id is not None:
            known = next((call for call in self._calls if call.id == call_id), None)
            # A piece may be the first one that has the id of the current call.
            if known is None and not name and self._calls and self._calls[-1].id is None:
                known = self._calls[-1]
        else:
            known = self._calls[-1] if self._calls else None
        if known is None or not name or not known.arguments:
            return known
        if known.name not in ("", name):
            may_be_rest = known is self._named_in_part and call_id in (None, known.id)
            whole = known.name + name
            is_rest = may_be_rest and any(tool.startswith(whole) for tool in self._tools)
            return known if is_rest else None
        # A piece with a name begins another call once the arguments of the known call are complete,
        # as of servers that give all calls one index; unless the server repeats index, name and id.
        is_other = call_id is not None and call_id != known.id
        repeats = name == known.name and not is_other and index is not None
        return None if not repeats and known.is_complete() else known


@dataclass(frozen=True, slots=True)
class TokenStop:
    """The end of a choice at a stop token.

    ``before`` are the entries before that token, ``after`` is the text from it on.
    """

    token: int
    before: list[dict[str, Any]]
    after: str

    def shorten(self, delta: dict[str, Any]) -> dict[str, Any]:
        """Return the delta, or a call in it, without the text from the stop token on."""
        shortened = dict(delta)
        for key, value in delta.items():
            match key, value:
                case (("content" | "reasoning_content" | "arguments"), str(text)):
                    shortened[key] = text.removesuffix(self.after)
                case "function", dict(function):
                    shortened[key] = self.shorten(function)
                case "tool_calls", list(calls):
                    shortened[key] = [self.shorten(call) for call in calls]
        return shortened


def find_token_stop(stop_ids: Collection[int], choice: dict[str, Any]) -> TokenStop | None:
    """Return the stop at the first of these tokens in a chunk's choice, or None."""
    entries = (choice.get("logprobs") or {}).get("content") or []
    for position, entry in enumerate(entries):
        if entry["id"] in stop_ids:
            # A character that the stop token is a part of is cut as a whole.
            after = _text(entries).removeprefix(_text(entries[:position]))
            return TokenStop(entry["id"], entries[:position], after)
    return None


def _text(entries: list[dict[str, Any]]) -> str:
    """Return the whole characters of these tokens."""
    return b"".join(bytes(entry["bytes"]) for entry in entries).decode("utf-8", "ignore")
