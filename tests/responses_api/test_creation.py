"""From a request to the submission of its generation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pytest_django.fixtures import Settings

from inference_site.accounts.keys import Caller
from inference_site.accounts.models import Project
from inference_site.catalogue.fleet.leases import Lease, LiveView, LiveWorker, ModelReport, prune
from inference_site.core.errors.api_errors import ApiError, InvalidRequestError
from inference_site.core.storage.redis import site_client
from inference_site.gateway.submission import model_access
from inference_site.runs.models import ServiceClass
from inference_site.runs.queue import new_id
from responses_api.creation import Creation, create
from responses_api.events import decode
from responses_api.wire.requests import ResponseRequest

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _live_demo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A worker that serves the demo model."""
    name = new_id("host:")
    Lease(name, lambda: LiveWorker(name, (ModelReport("demo", slots=1, busy=0),))).renew()
    monkeypatch.setattr(model_access, "live_view", LiveView(ttl_s=0))
    yield
    site_client().delete(f"worker:{name}")
    prune()


def created(project: Project, **fields: Any) -> Creation:
    body = {"model": "demo", "input": "x", **fields}
    return create(Caller(0, project.pk), ResponseRequest.model_validate(body))


def test_default_model_answers_who_names_none(project: Project, settings: Settings) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        created(project, model=None)
    assert caught.value.code == "missing_required_parameter"
    settings.DEFAULT_MODEL = "demo"
    assert created(project, model=None).response["model"] == "demo"


def test_model_is_named_as_the_catalogue_names_it(project: Project) -> None:
    assert created(project, model=" DEMO ").response["model"] == "demo"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ServiceClass.FOREGROUND),
        ({"background": True}, ServiceClass.BACKGROUND),
        ({"service_tier": "flex"}, ServiceClass.BACKGROUND),
        ({"service_tier": "priority"}, ServiceClass.FOREGROUND),
    ],
)
def test_who_waits_goes_first(
    project: Project, fields: dict[str, Any], expected: ServiceClass
) -> None:
    assert created(project, **fields).submission.service_class == expected


@pytest.mark.parametrize(
    ("fields", "emits", "records"),
    [
        ({}, True, True),
        ({"stream": True}, True, True),
        ({"store": False}, False, False),
        ({"store": False, "stream": True}, True, False),
    ],
)
def test_events_are_made_for_who_may_read_them(
    project: Project, fields: dict[str, Any], emits: bool, records: bool
) -> None:
    submission = created(project, **fields).submission
    assert submission.document.assembly.emits is emits
    assert bool(submission.frames) is emits
    assert (submission.with_row is not None) is records


def test_stream_begins_when_the_response_is_accepted(project: Project) -> None:
    frames = created(project, background=True).submission.frames
    assert [decode(frame)["type"] for frame in frames] == ["response.created", "response.queued"]


@pytest.mark.parametrize("sends_done", [True, False])
def test_site_decides_whether_streams_end_with_done(
    project: Project, settings: Settings, sends_done: bool
) -> None:
    settings.RESPONSES_SEND_DONE = sends_done
    assert created(project).submission.document.assembly.sends_done is sends_done


def test_end_user_is_the_safety_identifier_or_the_user(project: Project) -> None:
    assert created(project, safety_identifier="a", user="b").submission.end_user == "a"
    assert created(project, user="b").submission.end_user == "b"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True, "store": False}, "background"),
        ({"stream_options": {}}, "stream_options"),
        ({"grammar": "root ::= [a]", "text": {"format": {"type": "json_object"}}}, "grammar"),
        ({"grammar": "root ::= [a]", "tool_choice": "required",
          "tools": [{"type": "function", "name": "f"}]}, "grammar"),
        ({"input": None}, "input"),
    ],
)  # fmt: skip
def test_fields_that_contradict_each_other_are_refused(
    project: Project, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(ApiError) as caught:
        created(project, **fields)
    assert caught.value.param == param
