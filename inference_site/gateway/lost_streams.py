"""Readers of lost streams: the event log expired before they reached its end, or Redis lost it.

If the generation has ended and its result is stored, the reader gets the rest from the database.
If it still runs and its result will be stored, the reader waits for its end. Every other reader
gets the error ``stream_lost``; for a generation that has ended the error carries the usage, because
it was computed and charged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter

from asgiref.sync import sync_to_async

from inference_site.core.errors.api_errors import StreamLostError
from inference_site.core.storage.postgresql import release_connection_after
from inference_site.gateway.follower import Follower
from inference_site.runs.kinds import kind_of
from inference_site.runs.models import TERMINAL, Generation, Status
from inference_site.runs.streams.batches import Batch

_id = attrgetter("generation_id")


@dataclass(frozen=True, slots=True)
class LostRun:
    """The row of a generation whose stream is lost."""

    kind: str
    status: str
    input_tokens: int
    output_tokens: int

    @property
    def error(self) -> StreamLostError:
        """The error that its readers get."""
        if self.status not in TERMINAL:
            return StreamLostError()
        usage = (self.input_tokens, self.output_tokens)
        return StreamLostError(usage, has_completed=self.status == Status.COMPLETED)


async def runs_of(followers: Sequence[Follower], **states: object) -> dict[str, LostRun]:
    """Return the followed generations whose rows match the filter ``states``, by public id."""
    ids = {follower.generation_id for follower in followers}
    if not ids:
        return {}
    return await sync_to_async(_runs, thread_sensitive=False)(ids, states)


def _runs(ids: set[str], states: dict[str, object]) -> dict[str, LostRun]:
    columns = ("public_id", "kind", "status", "input_tokens", "output_tokens")
    with release_connection_after():
        found = Generation.objects.filter(public_id__in=ids, **states)
        return {public_id: LostRun(*rest) for public_id, *rest in found.values_list(*columns)}


async def stored_among(runs: Mapping[str, LostRun]) -> Collection[str]:
    """Return the ids of running generations whose results are stored and not deleted."""
    running = {id_: run for id_, run in runs.items() if run.status not in TERMINAL}
    if not running:
        return ()

    def stored() -> set[str]:
        with release_connection_after():
            checks = {id_: kind_of(run.kind).is_deleted for id_, run in running.items()}
            return {id_ for id_, is_deleted in checks.items() if is_deleted and not is_deleted(id_)}

    return await sync_to_async(stored, thread_sensitive=False)()


async def replay_to(followers: Iterable[Follower], runs: Mapping[str, LostRun]) -> None:
    """Offer the rest of ended streams to their readers, where the result is stored.

    The readers of one stream share the rebuilt batches.
    """
    replay = sync_to_async(_replayed, thread_sensitive=False)
    waiting = [f for f in followers if not f.has_ended and f.generation_id in runs]
    for id_, of_stream in groupby(sorted(waiting, key=_id), _id):
        rebuilt: dict[bool, Batch | None] = {}
        for follower in of_stream:
            is_new = follower.next_number == 0
            if is_new not in rebuilt:
                rebuilt[is_new] = await replay(id_, runs[id_].kind, may_renumber=is_new)
            if (batch := rebuilt[is_new]) is not None:
                follower.offer(batch)


def _replayed(public_id: str, kind: str, *, may_renumber: bool) -> Batch | None:
    replay = kind_of(kind).replay
    with release_connection_after():
        stored = None if replay is None else replay(public_id, may_renumber=may_renumber)
        return None if stored is None else stored.make()


def end_lost(followers: Sequence[Follower], runs: Mapping[str, LostRun]) -> None:
    """End the readers of lost streams with the error, in the wire format of their kind."""
    for follower in followers:
        run, first = runs.get(follower.generation_id), follower.next_number
        if run is None:
            continue
        ending = kind_of(run.kind).failure(run.error, first=first)
        follower.offer(Batch(first, ending.frames, replace(ending, frames=(), is_early=False)))
