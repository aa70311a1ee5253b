"""What the address of a list may filter and order by: what the list declares, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.apps import apps
from django.contrib import admin
from django.contrib.auth import get_user_model
from django.db.models import Field
from django.test import Client, RequestFactory
from django.urls import reverse

from inference_site.accounts.models import ApiKey
from tests.responses_api.chains import Chain

pytestmark = pytest.mark.django_db
admin.autodiscover()
ADMINS = sorted(
    (
        admin.site.get_model_admin(model)
        for model in apps.get_models()
        if admin.site.is_registered(model)
    ),
    key=str,
)
RESPONSES = "/admin/responses_api/storedresponse/"
LOOKUPS = ("", "__exact", "__startswith", "__regex", "__gte", "__contains", "__isnull", "__in")


def _fields(model: Any, depth: int = 2) -> Iterator[str]:
    """Every field of a model, and of those that it is related to."""
    for field in model._meta.get_fields():
        yield field.name
        related = getattr(field, "related_model", None)
        if depth and related is not None:
            yield from (f"{field.name}__{name}" for name in _fields(related, depth - 1))
        elif isinstance(field, Field) and field.get_internal_type() == "JSONField":
            yield f"{field.name}__instructions"


def _declared(model_admin: Any) -> set[str]:
    paths = (one if isinstance(one, str) else one[0] for one in _field_filters(model_admin))
    own = {one.parameter_name for one in model_admin.list_filter if hasattr(one, "parameter_name")}
    return own | {path + end for path in paths for end in ("", "__id")}


def _field_filters(model_admin: Any) -> Iterator[Any]:
    return (one for one in model_admin.list_filter if not hasattr(one, "parameter_name"))


@pytest.mark.parametrize("model_admin", ADMINS, ids=str)
def test_a_list_filters_by_no_field_that_it_does_not_declare(model_admin: Any) -> None:
    request = RequestFactory().get("/")
    undeclared = {*_fields(model_admin.model)} - _declared(model_admin)
    assert undeclared
    lookups = (f"{name}{lookup}" for name in sorted(undeclared) for lookup in LOOKUPS)
    allowed = [lookup for lookup in lookups if model_admin.lookup_allowed(lookup, "a", request)]
    assert allowed == []


@pytest.mark.parametrize("model_admin", ADMINS, ids=str)
def test_a_list_filters_by_all_that_it_offers(
    model_admin: Any, admin: Client, api_key: tuple[ApiKey, str]
) -> None:
    request = RequestFactory().get("/")
    request.user = get_user_model().objects.get()
    offered = {
        parameter
        for spec in model_admin.get_changelist_instance(request).filter_specs
        for parameter in spec.expected_parameters()
    }
    assert {one for one in offered if not model_admin.lookup_allowed(one, "a", request)} == set()
    meta = model_admin.model._meta
    address = reverse(f"admin:{meta.app_label}_{meta.model_name}_changelist")
    for parameter in offered:
        assert admin.get(address, {parameter: "1"}).status_code in (200, 302)
    assert admin.get(address, {"pk__gte": "1"}).status_code == 400


@pytest.mark.parametrize("page", ["", "export/"])
def test_prompts_are_not_read_letter_by_letter(
    page: str, staff: Callable[..., Client], api_key: tuple[ApiKey, str]
) -> None:
    Chain(api_key[0]).turn("hello", instructions="The PIN is 4711.")
    looker = staff("responses_api.view_storedresponse")
    for guess in ("The PIN is 4", "The PIN is 5"):
        for name in ("request__instructions__startswith", "items__data__content__0__text"):
            assert looker.get(f"{RESPONSES}{page}", {name: guess}).status_code in (400, 403)


@pytest.mark.parametrize("order", ["1", "-8", "2.-3", "99", "request"])
def test_a_list_without_sorting_keeps_its_order(
    order: str, admin: Client, api_key: tuple[ApiKey, str]
) -> None:
    chain = Chain(api_key[0])
    made = [chain.turn(text, metadata={"a": text}) for text in "bca"]
    text = admin.get(RESPONSES, {"o": order}).content.decode()
    places = [text.index(f"{RESPONSES}{one.pk}/change/") for one in made]
    assert places == sorted(places, reverse=True)
