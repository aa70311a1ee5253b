"""Stored chat completions: store, get, change, replay as a stream, and prune.

A project can only reach its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import orjson
from django.db.models import Q, QuerySet
from django.db.models.fields.json import KT
from django.db.models.functions import Coalesce, Left

from completions.assemblers.chat import ChatAssembler, ChatAssembly
from completions.models import StoredCompletion
from inference_site.accounts.models import retention_cutoffs
from inference_site.core.admin_pages.labels import PREVIEW_LENGTH
from inference_site.core.domain.deltas import (
    Delta,
    Finish,
    FinishReason,
    ReasoningDelta,
    RefusalDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)
from inference_site.core.errors.api_errors import NotFoundError
from inference_site.core.storage.fields import replace_nul
from inference_site.core.storage.old_rows import delete_older, old_ids_among
from inference_site.runs.kinds import Assembler
from inference_site.runs.models import Generation, Status
from inference_site.runs.streams.batches import Batch, Ending, StoredStream
from inference_site.runs.streams.request_documents import ToStore


def store_result(
    generation_id: str, status: str, assembler: Assembler, store: ToStore | None
) -> None:
    """Keep a completed chat completion, if asked for (see ``runs.kinds.StoreResult``)."""
    if store is None or status != Status.COMPLETED:
        return
    assert isinstance(assembler, ChatAssembler)
    completion = assembler.completion()
    StoredCompletion.objects.create(
        public_id=generation_id,
        project_id=store.project_id,
        model=completion["model"],
        metadata=store.metadata,
        messages=store.messages,
        completion=completion,
        streamed=assembler.as_streamed(),
    )


def replace_metadata(stored: StoredCompletion, metadata: dict[str, str]) -> None:
    """Change the metadata of a stored chat completion. Raise NotFoundError if it was deleted."""
    stored.metadata = replace_nul(metadata)
    if not StoredCompletion.objects.filter(pk=stored.pk).update(metadata=stored.metadata):
        raise _not_found(stored.public_id)


def completions_of(project_id: int) -> QuerySet[StoredCompletion]:
    """Return the project's stored completions."""
    return StoredCompletion.objects.filter(project_id=project_id)


def find(project_id: int, public_id: str) -> StoredCompletion:
    """Return a stored completion. Raise NotFoundError for an unknown one and another project's."""
    stored = completions_of(project_id).filter(public_id=public_id).first()
    if stored is None:
        raise _not_found(public_id)
    return stored


def _not_found(public_id: str) -> NotFoundError:
    return NotFoundError(f"Completion with id '{public_id[:100]}' not found.")


def wire_completion(stored: StoredCompletion) -> dict[str, Any]:
    """Return the object as the API shows it."""
    completion: dict[str, Any] = dict(stored.completion)
    return {**completion, "metadata": stored.metadata}


def wire_messages(stored: StoredCompletion) -> list[dict[str, Any]]:
    """Return the messages of its request, each with an id."""
    entries = []
    for number, message in enumerate(stored.messages):
        content = message.get("content")
        parts = content if isinstance(content, list) else None
        if parts is not None:
            content = "".join(part.get("text") or part.get("refusal") or "" for part in parts)
        optional = ("tool_calls", "tool_call_id")
        entries.append(
            {
                "id": f"{stored.public_id}-{number}",
                "role": message["role"],
                "content": content,
                "name": message.get("name"),
                "content_parts": parts,
                "refusal": message.get("refusal"),
                **{key: message[key] for key in optional if message.get(key) is not None},
            }
        )
    return entries


_LEFT_OUT = b": left out\n\n"
_FRAME_BYTES = 300
"""Bytes of a chunk without its text."""


def replay_of(public_id: str, after: int = -1, *, may_renumber: bool = True) -> StoredStream | None:
    """Return the replay of a completion; None if it is not stored, or was deleted.

    Also None for a streamed completion without the sizes of its deltas.
    """
    del after, may_renumber  # The replayed frames have the original numbers.
    stored = StoredCompletion.objects.filter(public_id=public_id).first()
    if stored is None:
        return None
    runs = Generation.objects.filter(public_id=public_id, streamed=True)
    if stored.streamed is None and runs.exists():
        return None
    deltas = sum(len(run[2]) for run in (stored.streamed or {}).get("deltas", ()))
    size = 2 * len(str(stored.completion)) + _FRAME_BYTES * deltas
    return StoredStream(size, partial(replay, stored))


def replay(stored: StoredCompletion) -> Batch:
    """Return the whole stream. A comment replaces each chunk of prompt progress."""
    completion, streamed = stored.completion, stored.streamed
    body = orjson.dumps(completion)
    if streamed is None:
        return Batch(0, (), Ending((), 200, body))
    choices = completion["choices"]
    assembly = ChatAssembly(
        completion["id"],
        completion["created"],
        completion["model"],
        stream=True,
        include_usage=streamed["usage"],
        choices=len(choices),
        logprobs=any(choice["logprobs"] is not None for choice in choices),
        is_legacy=streamed["legacy"],
        service_tier=completion["service_tier"],
        timings="timings" in completion,
    )
    assembler = ChatAssembler(assembly)
    frames: list[bytes] = []
    for delta in _deltas(choices, streamed["deltas"]):
        frames += [_LEFT_OUT] if delta is None else assembler.feed(delta)
    usage, timings = completion["usage"], completion.get("timings", {})
    assembler.feed(
        Usage(
            input_tokens=usage["prompt_tokens"],
            output_tokens=usage["completion_tokens"],
            cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
            reasoning_tokens=usage["completion_tokens_details"]["reasoning_tokens"],
            prefill_ms=timings.get("prompt_ms", 0.0),
            decode_ms=timings.get("predicted_ms", 0.0),
        )
    )
    frames += assembler.complete().frames
    return Batch(0, frames, Ending((), 200, body))


class _Choice:
    """Cuts the texts of a stored choice into its original deltas."""

    def __init__(self, choice: dict[str, Any]) -> None:
        self.index: int = choice["index"]
        message = choice["message"]
        self._texts: dict[str, str] = {
            "text": message["content"] or "",
            "reasoning": message.get("reasoning_content") or "",
            "refusal": message.get("refusal") or "",
        }
        self._calls: list[dict[str, Any]] = message.get("tool_calls") or []
        if legacy := message.get("function_call"):
            self._calls = [{"id": "call", "type": "function", "function": legacy}]
        for number, call in enumerate(self._calls):
            function = call[call["type"]]
            text = function["input"] if call["type"] == "custom" else function["arguments"]
            self._texts[f"call {number}"] = text
        self._logprobs = list((choice["logprobs"] or {}).get("content") or ())
        self._finish, self._stop = choice["finish_reason"], choice.get("stop_str")

    def deltas(self, sort: str, sizes: Sequence[int], counts: Sequence[int]) -> Iterator[Delta]:
        """Yield the deltas of a run (see ``Recording``)."""
        if sort == "finish":
            reason: FinishReason = "tool_calls" if self._finish == "function_call" else self._finish
            yield Finish(reason, self.index, self._stop)
            return
        name, _, number = sort.partition(" ")
        source = f"call {number}" if number else name
        for position, size in enumerate(sizes):
            text, self._texts[source] = self._texts[source][:size], self._texts[source][size:]
            if name == "text":
                count = counts[position] if counts else 0
                entries, self._logprobs = self._logprobs[:count], self._logprobs[count:]
                yield TextDelta(text, self.index, tuple(map(_logprob, entries)))
            elif name == "reasoning":
                yield ReasoningDelta(text, self.index)
            elif name == "refusal":
                yield RefusalDelta(text, self.index)
            else:
                call, nth = self._calls[int(number)], int(number)
                is_custom = call["type"] == "custom"
                if name == "call":  # The first delta of the call.
                    called = call[call["type"]]["name"]
                    yield ToolCallDelta(nth, text, call["id"], called, self.index, is_custom)
                else:
                    yield ToolCallDelta(nth, text, index=self.index, is_custom=is_custom)


def _deltas(
    choices: Sequence[dict[str, Any]], runs: Sequence[Sequence[Any]]
) -> Iterator[Delta | None]:
    """Yield the deltas in their order; None for prompt progress, which is not stored."""
    parts = [_Choice(choice) for choice in choices]
    for sort, index, sizes, *counts in runs:
        if sort == "progress":
            yield from [None] * len(sizes)
        else:
            yield from parts[index].deltas(sort, sizes, counts[0] if counts else ())


def _logprob(entry: dict[str, Any]) -> TokenLogprob:
    top = tuple(map(_logprob, entry.get("top_logprobs", ())))
    return TokenLogprob(entry["token"], entry["logprob"], bytes(entry["bytes"]), top)


_BATCH = 500


def prune(until: float) -> int:
    """Delete expired rows, oldest first, until the monotonic clock passes ``until``.

    Return their number.
    """
    deleted = 0
    for project, since in retention_cutoffs("completions_days", until):
        # The index of a project's rows is in the order of their ids.
        rows = StoredCompletion.objects.filter(project=project)
        deleted += delete_older(rows, since, until, _BATCH)
        if ids := old_ids_among(StoredCompletion, project, since, until, _BATCH):
            deleted += rows.filter(pk__in=ids).delete()[0]
    return deleted


def results_naming(end_user: str, project_id: int | None) -> Collection[str]:
    """Return those with this ``user_id``; see ``inference_site.runs.kinds.Naming``."""
    rows = StoredCompletion.objects.filter(metadata__contains={"user_id": end_user})
    own = rows if project_id is None else rows.filter(project=project_id)
    return list(own.values_list("public_id", flat=True))


def forget(
    end_user: str, project_id: int | None, generation_ids: Sequence[str]
) -> Mapping[str, int]:
    """Delete stored completions of an end user (see ``inference_site.runs.kinds.Forgetting``)."""
    deleted, _ = StoredCompletion.objects.filter(public_id__in=generation_ids).delete()
    return {"chat completions": deleted}


def with_words(text: str) -> QuerySet[StoredCompletion]:
    """Return the stored completions whose messages or answer have all of these words.

    Parts of words are found too. No index has the words: use it in bounded searches only.
    """
    rows = StoredCompletion.objects.all()
    for word in text.replace('"', " ").split():
        rows = rows.filter(Q(messages__icontains=word) | Q(completion__icontains=word))
    return rows


def with_previews(
    rows: QuerySet[StoredCompletion], length: int = PREVIEW_LENGTH
) -> QuerySet[StoredCompletion]:
    """Add ``asked`` and ``answered``: the beginnings of the last message and the first answer.

    They have at most one character more than ``length``, which says that there is more.
    """
    asked = Coalesce(KT("messages__-1__content__0__text"), KT("messages__-1__content"))
    answered = KT("completion__choices__0__message__content")
    return rows.annotate(asked=Left(asked, length + 1), answered=Left(answered, length + 1))
