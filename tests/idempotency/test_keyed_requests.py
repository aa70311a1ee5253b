"""The rows of idempotency keys: who gets a key, and what is kept for how long."""

from __future__ import annotations

import datetime as dt
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from django.db import connection, transaction
from django.utils import timezone

from inference_site.accounts.models import ApiKey
from inference_site.gateway.idempotency import models
from inference_site.gateway.idempotency.models import (
    KeyClaim,
    KeyedRequest,
    KeyLocked,
    KeyTaken,
    find_use,
    forget_answers,
    prune,
    trim_answers,
)

pytestmark = pytest.mark.django_db(transaction=True)
Key = tuple[ApiKey, str]


@pytest.fixture
def claim(api_key: Key) -> KeyClaim:
    """A request that is answered at once."""
    return KeyClaim(api_key[0].pk, api_key[0].project_id, "k", "r", status=200, body="{}")


@pytest.fixture
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims that wait a tenth of a second for each other."""
    monkeypatch.setattr(models, "_BOUND", models._BOUND.replace("'2000'", "'100'"))


def test_of_claims_at_one_moment_one_is_written(claim: KeyClaim) -> None:
    start = threading.Barrier(8)

    def write(number: int) -> bool:
        try:
            with transaction.atomic():
                start.wait(30)
                replace(claim, body=str(number)).write()
        except KeyTaken:
            return False
        finally:
            connection.close()
        return True

    with ThreadPoolExecutor(8) as pool:
        written = list(pool.map(write, range(8)))
    assert written.count(True) == 1
    assert KeyedRequest.objects.get().body == str(written.index(True))


def test_of_those_who_take_a_key_over_one_does(claim: KeyClaim) -> None:
    claim.write()
    known = find_use(claim.api_key_id, claim.key)
    assert known is not None
    mine = replace(claim, replaces=known.id, request="other")
    mine.write()
    with pytest.raises(KeyTaken):
        mine.write()
    taken = find_use(claim.api_key_id, claim.key)
    assert taken is not None
    assert (taken.request, taken.id != known.id) == ("other", True)


@pytest.mark.usefixtures("short_wait")
def test_a_claim_that_is_not_committed_is_waited_for_a_while(claim: KeyClaim) -> None:
    def write() -> None:
        try:
            claim.write()
        finally:
            connection.close()

    with ThreadPoolExecutor(1) as pool:
        with transaction.atomic():
            claim.write()
            with pytest.raises(KeyLocked):
                pool.submit(write).result(60)
            transaction.set_rollback(True)
        pool.submit(write).result(60)
    assert KeyedRequest.objects.count() == 1


def test_a_claim_bounds_its_own_wait_alone(claim: KeyClaim) -> None:
    asked = "SELECT current_setting('lock_timeout')"
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SET LOCAL lock_timeout = 1234")
        claim.write()
        cursor.execute(asked)
        assert cursor.fetchone() == ("1234ms",)
    with connection.cursor() as cursor:
        cursor.execute(asked)
        assert cursor.fetchone() == ("0",)


def test_the_oldest_answers_go_and_what_has_generated_stays_without(
    claim: KeyClaim, settings: Any
) -> None:
    settings.IDEMPOTENCY_KEYS = 3
    for number in range(6):
        id_ = "resp_1" if number == 1 else ""
        replace(claim, key=str(number), generation_id=id_).write()
    replace(claim, key="run", generation_id="chatcmpl-1", status=0, body="").write()
    assert trim_answers(claim.project_id) == 3
    rows = KeyedRequest.objects.order_by("id").values_list("key", "body", "kept_bytes")
    assert list(rows) == [("1", "", 0), *((n, "{}", 2) for n in "345"), ("run", "", 0)]
    assert trim_answers(claim.project_id) == 0


def test_answers_are_bounded_by_their_bytes_too(
    claim: KeyClaim, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "_MOST_BYTES", 25)
    for number in range(4):
        replace(claim, key=str(number), body="x" * 10).write()
    assert prune(math.inf) == 2
    assert list(KeyedRequest.objects.order_by("id").values_list("key", flat=True)) == ["2", "3"]


def test_all_goes_after_a_day(claim: KeyClaim) -> None:
    for key in ("old", "new"):
        replace(claim, key=key).write()
    day_ago = timezone.now() - dt.timedelta(days=1, seconds=1)
    KeyedRequest.objects.filter(key="old").update(created_at=day_ago)
    assert find_use(claim.api_key_id, "old") is None
    replace(claim, key="old").write()  # It takes the row over.
    with pytest.raises(KeyTaken):
        replace(claim, key="old").write()
    KeyedRequest.objects.filter(key="old").update(created_at=day_ago)
    assert prune(math.inf) == 1
    assert KeyedRequest.objects.get().key == "new"


def test_an_answer_goes_with_the_result_of_its_generation(claim: KeyClaim) -> None:
    for key, id_ in (("gone", "resp_1"), ("other", "resp_2"), ("object", "")):
        replace(claim, key=key, generation_id=id_).write()
    forget_answers(["resp_1", ""])
    rows = KeyedRequest.objects.order_by("id").values_list("key", "body")
    assert list(rows) == [("gone", ""), ("other", "{}"), ("object", "{}")]
