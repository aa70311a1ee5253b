"""Generations that the site makes for a request: when a budget refuses them."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from django.utils import timezone

from inference_site.accounts.budgets import Estimate, reserve
from inference_site.accounts.models import ApiKey, Budget, BudgetSpend, Scope
from inference_site.catalogue.catalogue import catalogue
from inference_site.core.domain.request import GenerationRequest
from inference_site.runs.inner_runs import NoBudget, NotPossible, run_and_wait
from inference_site.runs.models import Generation, Status
from inference_site.runs.queue import new_id
from inference_site.runs.streams.request_documents import Assembly, Document
from inference_site.runs.usage.accounting import account
from tests.generations.rows import create_generation

MODEL = "demo-embedding"


def embed(key: ApiKey, size_bytes: int, **fields: Any) -> None:
    """Have texts embedded, without waiting."""
    request = GenerationRequest(MODEL, operation="embed", prompts=("x",))
    run_and_wait(
        new_id("embd-"),
        "vector_store.embedding",
        Document(request, Assembly()),
        key.pk,
        size_bytes=size_bytes,
        timeout_s=0,
        is_cancelled=lambda: False,
        in_background=True,
        **fields,
    )


def test_what_runs_reserves_the_rest_of_a_budget(api_key: tuple[ApiKey, str]) -> None:
    key = api_key[0]
    Budget.objects.create(project=key.project, unit="tokens", every="day", amount=100)
    now = timezone.now()
    reserve(key.project_id, key.pk, Estimate(90, Decimal(0)), now)
    create_generation(key, status=Status.RUNNING, created_at=now, reserved_tokens=90)
    with pytest.raises(NoBudget) as refused:
        embed(key, size_bytes=150)
    assert str(refused.value) == (
        "requests that have not ended reserve the rest of the budget of 100 tokens a day."
    )
    with pytest.raises(TimeoutError):  # It was accepted.
        embed(key, size_bytes=15)


def test_what_runs_for_a_request_counts_for_its_end_user_and_tags(
    api_key: tuple[ApiKey, str],
) -> None:
    key = api_key[0]
    for each in ("user", "tag:team"):
        Budget.objects.create(project=key.project, unit="tokens", every="day", amount=9, each=each)
    asked_by: dict[str, Any] = {"end_user": "ann", "tags": ["team=red"]}
    with pytest.raises(TimeoutError):  # It was accepted.
        embed(key, size_bytes=15, **asked_by)
    row = Generation.objects.get()
    assert (row.end_user, row.tags) == ("ann", ["team=red"])
    spends = BudgetSpend.objects.order_by("budget").values_list("value", "reserved")
    assert list(spends) == [("ann", Decimal(5)), ("red", Decimal(5))]
    while account():
        pass
    assert set(BudgetSpend.objects.values_list("spent", "reserved")) == {(Decimal(0), Decimal(0))}
    with pytest.raises(TimeoutError):
        embed(key, size_bytes=15)
    assert BudgetSpend.objects.count() == 2


def test_nothing_runs_for_a_key_that_may_not_generate_any_more(api_key: tuple[ApiKey, str]) -> None:
    ApiKey.objects.filter(pk=api_key[0].pk).update(scopes=[Scope.USAGE])
    with pytest.raises(NotPossible, match="not valid any more"):
        embed(api_key[0], size_bytes=15)
    assert not Generation.objects.exists()


def test_nothing_runs_on_a_model_that_is_for_other_projects(
    api_key: tuple[ApiKey, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vector store was imported, or the model was for its project before."""
    others = replace(catalogue().models[MODEL], projects=("another",))
    monkeypatch.setitem(catalogue().models, MODEL, others)
    with pytest.raises(NotPossible, match="`demo-embedding` does not exist"):
        embed(api_key[0], size_bytes=15)
    assert not Generation.objects.exists()
