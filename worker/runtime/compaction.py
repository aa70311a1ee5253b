"""Conversations that are too long for the context: truncated, or compacted.

Truncation drops the oldest turns. Compaction has the model summarise them before it answers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import orjson

from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.engines.registry import model_capabilities
from inference_site.core.domain.compaction import (
    SUMMARY_HEADING,
    SUMMARY_REQUEST,
    SUMMARY_TASK,
    CompactedContext,
    shortened,
    transcript,
)
from inference_site.core.domain.deltas import (
    CompactionDelta,
    Finish,
    Usage,
)
from inference_site.core.domain.errors import (
    AnswerTooLong,
    ContextLengthExceeded,
    InvalidRequest,
)
from inference_site.core.domain.request import (
    Compaction,
    GenerationRequest,
    History,
    Message,
    Sampling,
    TextPart,
    drop_oldest_turns,
    nearest_to_gap,
)
from worker.engines.base import Collector, Engine, OnEnd, Sink, start_and_report
from worker.media import resolve_media

_TOKEN_CHARACTERS = 4
"""Usual characters of a token; models that cannot render a prompt are estimated with it."""
_MESSAGE_TOKENS = 4
_MEDIA_CHARACTERS = 2_000
"""Counted for an image or a sound: it has about as many tokens as a text of this length."""
_SAFE_SHARE = 0.9
"""Of what a text to be filled in may keep: its parts differ in characters per token."""
_MOST_TRIES = 8
"""How many times a summary is tried: after each refusal, the transcript is made shorter."""


def start_truncating(engine: Engine, request: GenerationRequest, sink: Sink, ended: OnEnd) -> bool:
    """Start the request like ``Engine.start``, without its oldest turns if it must be truncated.

    A limit of the answer that the engine refuses is lowered, if the request allows that. The number
    of tokens of a prompt is known only after the engine has refused it. So the turns to drop are
    estimated from the lengths of their texts, and the engine is asked again. Nothing is started
    once the sink is cancelled. Raise, or end with, ContextLengthExceeded when even the last turn
    does not fit or the request does not allow truncation.
    """

    def start(request: GenerationRequest) -> bool:
        while not sink.cancelled:
            try:
                return engine.start(request, sink, partial(on_end, request))
            except InvalidRequest as exc:
                request = _fitted(request, exc)
        return False

    def on_end(request: GenerationRequest, error: Exception | None) -> None:
        if not isinstance(error, InvalidRequest):
            ended(error)
            return
        start_and_report(lambda: start(_fitted(request, error)), ended)

    return start(request)


def _fitted(request: GenerationRequest, refused: InvalidRequest) -> GenerationRequest:
    """Return a request that the engine may take after this refusal, else raise ``refused``.

    If the prompt is too long, it lacks at least one of the oldest turns, or some of the texts
    around a gap, where that is allowed.
    """
    if isinstance(refused, ContextLengthExceeded):
        if not request.truncate:
            raise refused
        context = refused.context_length
        answer = min(request.max_output_tokens or context // 4, context // 2)
        share = (context - answer) / refused.input_tokens
        if request.suffix is not None:
            shorter = nearest_to_gap(request, share * _SAFE_SHARE)
            if shorter == request:  # The answer is too long, and not the texts.
                raise refused
            return shorter
        lengths = [length_of(message) for message in request.messages]
        excess = sum(lengths) * (1 - share)
        messages = drop_oldest_turns(request.messages, lengths, excess)
        if len(messages) == len(request.messages):
            raise refused
        return replace(request, messages=messages)
    if isinstance(refused, AnswerTooLong) and request.lowers_max_output:
        return replace(request, max_output_tokens=refused.left, lowers_max_output=False)
    raise refused


def length_of(message: Message) -> int:
    """Return about how many characters the message has in the prompt."""
    media = (
        len(part.text) if isinstance(part, TextPart) else _MEDIA_CHARACTERS
        for part in message.parts
    )
    calls = (len(call.name) + len(call.arguments) for call in message.tool_calls)
    return 16 + len(message.text or "") + sum(media) + sum(calls)


class TurnSink(Sink, Protocol):
    """The sink of a run that has several turns."""

    def spend(self, usage: Usage) -> None:
        """Take the usage of a turn that has ended; later usages are added to it."""


def start_compacting(
    engine: Engine,
    request: GenerationRequest,
    sink: TurnSink,
    ended: OnEnd,
    project_id: int,
) -> bool:
    """Start the request like ``start_truncating``, after a summary of its older turns if it is due.

    A summary is due when the prompt has ``threshold`` tokens and at least half as many can be
    summarised, or when the engine refuses the prompt for its length. It comes before the first
    turn of a run, or before one after calls of tools, in the run's own slot: a run that starts
    again compacts again, unless calls of a later turn were saved, and its tokens are part of the
    run's usage. A turn has at most one summary, which reads at most one context and writes at most
    ``Compaction.summary_tokens``. What does not fit into that context is left out, oldest first.
    The calling thread waits for the summary. The request's media need not be resolved: those that
    are left are files of this project.
    """
    if request.compaction is None:
        return start_truncating(engine, resolve_media(request, project_id), sink, ended)
    attempts = _attempts(engine, request, request.compaction, sink)

    def start(refused: ContextLengthExceeded | None) -> bool:
        for attempt in attempts:
            try:
                return start_truncating(engine, resolve_media(attempt, project_id), sink, on_end)
            except ContextLengthExceeded as exc:
                refused = exc
        if refused is not None and not sink.cancelled:
            raise refused
        return False

    def on_end(error: Exception | None) -> None:
        if not isinstance(error, ContextLengthExceeded):
            ended(error)
            return
        # On a thread: the engine's own must not wait for a summary.
        again = partial(start, error)
        threading.Thread(target=start_and_report, args=(again, ended), daemon=True).start()

    return start(None)


def _attempts(
    engine: Engine, request: GenerationRequest, compaction: Compaction, sink: TurnSink
) -> Iterator[GenerationRequest]:
    """Yield the request, compacted if that is due; then, while the engine refuses it, shorter ones.

    The last one has the instructions and the newest turn alone.
    """
    history = compaction.split(request.messages)
    if not compaction.is_whole_answer and not _is_due(engine, request, compaction, history, sink):
        if sink.cancelled:
            return
        yield replace(request, truncate=request.truncate and not history.middle)
    newest = history.newest
    if history.middle or compaction.is_whole_answer:
        questions = [message for message in history.middle if message.role == "user"]
        if newest and newest[0].role == "assistant" and questions:
            # Results of tools come after the question that led to their calls. A question that is
            # longer than a summary loses its middle, which the summary has.
            text = shortened(questions[-1].all_text, compaction.summary_tokens * _TOKEN_CHARACTERS)
            newest = (Message("user", text), *newest)
        summary = _summary(engine, request, compaction, history, sink)
        if sink.cancelled:
            return
        leading = history.leading[compaction.instructions :]
        context = CompactedContext(summary, leading, newest)
        sink.feed(CompactionDelta(context))
        if compaction.is_whole_answer:
            sink.feed(Finish("stop"))
            return
        yield replace(context.applied_to(request), truncate=False)
    yield replace(request, messages=(*history.leading, *newest))


def _is_due(
    engine: Engine,
    request: GenerationRequest,
    compaction: Compaction,
    history: History,
    sink: Sink,
) -> bool:
    """Whether the prompt has reached the threshold, and half of that can be summarised."""
    characters = sum(map(length_of, request.messages))
    tools = sum(len(orjson.dumps(tool.parameters)) for tool in request.tools)
    middle = sum(map(length_of, history.middle))
    # A token has at least one character, but for what the template adds.
    if not middle or characters + tools < compaction.threshold:
        return False
    tokens = (characters + tools) // _TOKEN_CHARACTERS + len(request.messages) * _MESSAGE_TOKENS
    if compaction.counts and not request.has_parts:
        turn = Collector(sink)
        try:
            engine.run(replace(request, operation="render"), turn)
        except ContextLengthExceeded:
            return True
        tokens = len(turn.tokens)
    share = middle / (characters + tools)
    return tokens >= compaction.threshold and tokens * share * 2 >= compaction.threshold


def _summary(
    engine: Engine,
    request: GenerationRequest,
    compaction: Compaction,
    history: History,
    sink: TurnSink,
) -> str:
    """Return the model's summary of the middle; the end of the transcript if it wrote nothing.

    Raise ContextLengthExceeded if the model cannot read even a short transcript.
    """
    middle, has_earlier = history.middle, compaction.has_summary
    if len(middle) == int(has_earlier):  # Nothing has come after the earlier summary, if any.
        return "".join(one.all_text.removeprefix(SUMMARY_HEADING) for one in middle)
    task = SUMMARY_TASK
    if compaction.is_whole_answer and compaction.instructions:
        own: Sequence[Message] = history.leading[: compaction.instructions]
        task = "\n\n".join([*(message.all_text for message in own), SUMMARY_TASK])
    spec = catalogue().models.get(request.model)
    has_template = spec is not None and "chat_template" in model_capabilities(spec)
    most = sum(map(length_of, middle)) + len(task)
    for _ in range(_MOST_TRIES):
        text = transcript(middle, most, keeps_first=has_earlier)
        asked = GenerationRequest(
            model=request.model,
            messages=(Message("system", task), Message("user", SUMMARY_REQUEST.format(text))),
            max_output_tokens=compaction.summary_tokens,
            sampling=Sampling() if spec is None else spec.sampling,
            template_vars={"enable_thinking": False} if has_template else {},
        )
        turn = Collector(sink)
        try:
            engine.run(asked, turn)
        except ContextLengthExceeded as exc:
            refused = exc
            room = max(exc.context_length - compaction.summary_tokens, exc.context_length // 2)
            most = int(min(most, len(text)) * min(room / exc.input_tokens, 1) * 0.9)
        else:
            return turn.text.strip() or transcript(middle, compaction.summary_tokens)
        finally:
            sink.spend(turn.usage)
    raise refused
