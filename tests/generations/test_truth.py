"""What ``manage.py doctor`` finds when rows, results and logs contradict each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta

from django.utils import timezone

from inference_site.accounts.models import ApiKey
from inference_site.core.storage.redis import client_for
from inference_site.ops.doctor.checks import Finding, check_logs, check_rows
from inference_site.runs.models import Status
from inference_site.runs.streams.batches import Batch
from inference_site.runs.streams.event_log import log_key
from tests.generations.rows import create_generation
from tests.responses_api.chains import Chain, end_generation

Key = tuple[ApiKey, str]


def levels(check: Callable[[], Iterator[Finding]]) -> list[str]:
    return [finding.level.value for finding in check()]


def test_a_site_without_contradictions_has_none(api_key: Key) -> None:
    create_generation(api_key[0])
    Chain(api_key[0]).turn("a")
    assert levels(check_rows) == ["ok", "ok", "ok"]
    assert levels(check_logs) == ["ok"]


def test_each_contradiction_is_found(api_key: Key) -> None:
    long_ago = timezone.now() - timedelta(minutes=5)
    row = create_generation(
        api_key[0], status=Status.RUNNING, worker="host:1:gone", claimed_at=long_ago
    )
    end_generation(Chain(api_key[0]).accept("a"), Status.FAILED)
    for batch in (Batch(0, [b"0"]), Batch(5, [b"5"])):
        entry: dict[bytes, bytes] = {b"b": batch.pack()}
        client_for(row.public_id).xadd(log_key(row.public_id), entry, id=batch.entry_id)  # type: ignore[arg-type]  # redis-py's types know fewer keys and values than it takes.
    assert levels(check_rows) == ["fail", "fail", "ok"]
    [finding] = check_logs()
    assert (finding.level.value, row.public_id in finding.found) == ("warn", True)
