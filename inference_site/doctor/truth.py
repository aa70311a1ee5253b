"""Whether rows, stored results, locks and event logs agree about each generation."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

from django.db.models.functions import Now

from inference_site.doctor.finding import Finding, judged
from inference_site.fleet.leases import live_workers
from inference_site.generations.kinds import mendings
from inference_site.generations.models import Generation, Status
from inference_site.streams.batches import is_whole
from inference_site.streams.event_log import read_log

_ABANDONED_S = 60
"""So old a run of a dead worker should have been given up long ago."""
_MOST_LOGS = 200


def check_rows() -> Iterator[Finding]:
    """Look for generations that have no end, and for results that deny the end they have."""
    old = Generation.objects.filter(
        status=Status.RUNNING, claimed_at__lt=Now() - timedelta(seconds=_ABANDONED_S)
    )
    count = old.exclude(worker__in=[worker.id for worker in live_workers()]).count()
    yield judged(
        "runs of dead workers",
        f"{count} for more than {_ABANDONED_S} s",
        "Maintenance ends them: see why it does not in the log of `manage.py beat`.",
        fail=bool(count),
    )
    for what, number in (pair for app in mendings() for pair in app.contradictions().items()):
        yield judged(
            what,
            str(number),
            "Maintenance mends them: see why it does not in the log of `manage.py beat`.",
            fail=bool(number),
        )


def check_logs() -> Iterator[Finding]:
    """Look for lost frames in the event logs of what runs."""
    running = Generation.objects.filter(status=Status.RUNNING).order_by("-id")
    ids = list(running.values_list("public_id", flat=True)[:_MOST_LOGS])
    torn = [public_id for public_id in ids if not is_whole(read_log(public_id))]
    yield judged(
        "event logs",
        f"{len(torn)} of {len(ids)} running streams have lost frames: {', '.join(torn[:3])}"
        if torn
        else f"{len(ids)} running streams are whole",
        "Their readers are told so, stored responses are not affected. Redis was flushed, evicted "
        "keys or lost its last writes: set `appendonly yes` and `maxmemory-policy noeviction`.",
        warn=bool(torn),
    )
