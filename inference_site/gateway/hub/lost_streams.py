"""Streams that are over and whose log is gone: it expired before a slow reader came to its end, or
was lost with its Redis. What is stored is read on from there; other readers get an error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter

from asgiref.sync import sync_to_async

from inference_site.errors.api_errors import UnavailableError
from inference_site.gateway.hub.follower import Follower
from inference_site.generations.kinds import kind_of
from inference_site.generations.models import Generation
from inference_site.storage.connections import lent_connection
from inference_site.streams.batches import Batch

_id = attrgetter("generation_id")


async def kinds_of(followers: Sequence[Follower], **states: object) -> dict[str, str]:
    """Return the kinds of the generations that are followed, of those in these states."""
    ids = {follower.generation_id for follower in followers}
    if not ids:
        return {}
    return await sync_to_async(_kinds, thread_sensitive=False)(ids, states)


def _kinds(ids: set[str], states: dict[str, object]) -> dict[str, str]:
    with lent_connection():
        found = Generation.objects.filter(public_id__in=ids, **states)
        return dict(found.values_list("public_id", "kind"))


async def replay_to(followers: Iterable[Follower], kinds: Mapping[str, str]) -> None:
    """Offer the readers of the streams of these kinds, which are over, what comes next, where it is
    stored. Those of one stream share what is made anew."""
    replay = sync_to_async(_replayed, thread_sensitive=False)
    waiting = [f for f in followers if not f.has_ended and f.generation_id in kinds]
    for id_, of_stream in groupby(sorted(waiting, key=_id), _id):
        made: dict[bool, list[Batch]] = {}
        for follower in of_stream:
            is_begun = follower.next_number > 0
            if is_begun not in made:
                made[is_begun] = await replay(id_, kinds[id_], is_begun=is_begun)
            for batch in made[is_begun]:
                follower.offer(batch)


def _replayed(public_id: str, kind: str, *, is_begun: bool) -> list[Batch]:
    replay = kind_of(kind).replay
    with lent_connection():
        remake = None if replay is None else replay(public_id, is_begun=is_begun)
        return [] if remake is None else remake.make()


def end_lost(followers: Sequence[Follower], kinds: Mapping[str, str]) -> None:
    """End the readers of streams whose frames are lost, in the words of their kind."""
    for follower in followers:
        error = UnavailableError("The stream was lost. Please try again.", code="stream_lost")
        kind, first = kinds.get(follower.generation_id), follower.next_number
        if kind is None:
            continue
        ending = kind_of(kind).failure(error, first=first)
        follower.offer(Batch(first, ending.frames, replace(ending, frames=(), is_early=False)))
