"""The lines of a batch: each state change is guarded by the state of its batch."""

from __future__ import annotations

import datetime as dt
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import transaction
from django.utils import timezone

from inference_site.accounts.models import ApiKey
from inference_site.batches.models import Batch, BatchLine, BatchStatus, LineState
from inference_site.core.storage.postgresql import release_connection_after

Key = tuple[ApiKey, str]


@pytest.mark.django_db(transaction=True)
def test_a_cancel_waits_for_the_line_that_is_being_put_into_the_queue(api_key: Key) -> None:
    """Otherwise the results could be written without it, although it runs."""
    key, now = api_key[0], timezone.now()
    batch = Batch.objects.create(
        public_id="batch_1",
        project_id=key.project_id,
        api_key=key,
        window_s=60,
        expires_at=now + dt.timedelta(hours=1),
        status=BatchStatus.IN_PROGRESS,
    )
    first, second = (
        BatchLine.objects.create(batch=batch, number=number, custom_id=str(number), request="")
        for number in (1, 2)
    )

    def cancel() -> list[str | None]:
        with release_connection_after():
            Batch.objects.cancel(Batch.objects.get(pk=batch.pk))
            running = BatchLine.objects.filter(batch=batch, state=LineState.RUNNING)
            return list(running.values_list("generation_id", flat=True))

    with ThreadPoolExecutor(1) as pool:
        with transaction.atomic():
            assert BatchLine.objects.begin(first, "chatcmpl-1")
            cancelled = pool.submit(cancel)
            with pytest.raises(TimeoutError):
                cancelled.result(0.5)
        assert cancelled.result(60) == ["chatcmpl-1"]
    assert not BatchLine.objects.begin(second, "chatcmpl-2")
