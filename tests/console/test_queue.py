"""The page of the queue: who waits, and what an operator does about it."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest
import redis
from django.contrib.admin.models import LogEntry
from django.test import Client

from inference_site.accounts.keys import create_key
from inference_site.accounts.models import ApiKey, Project
from inference_site.console import queue_page
from inference_site.runs.models import Claim, Generation, ServiceClass, Status
from inference_site.runs.streams.event_log import read_log
from inference_site.runs.streams.request_documents import save_document
from tests.generations.rows import chat_document, create_generation

Key = tuple[ApiKey, str]
QUEUE = "/admin/queue/"


def act(browser: Client, generation: Generation, action: str) -> int:
    return browser.post(f"{QUEUE}{generation.pk}/", {"action": action}).status_code


def cells(text: str) -> str:
    """Return the text of a page between its tags, each blank one space."""
    return " ".join(re.sub("<[^>]*>", " ", text).split())


def test_waiting_is_shown_by_project_and_class(
    admin: Client, api_key: Key, other_key: ApiKey
) -> None:
    create_generation(api_key[0])
    create_generation(other_key, service_class=ServiceClass.BACKGROUND)
    text = admin.get(QUEUE).content.decode()
    assert "owner foreground 1" in cells(text)
    assert "other background 1" in cells(text)


def test_a_generation_that_is_moved_up_is_claimed_first(admin: Client, api_key: Key) -> None:
    create_generation(api_key[0])
    late = create_generation(api_key[0], service_class=ServiceClass.BACKGROUND)
    assert act(admin, late, "up") == 302
    claim = Generation.objects.claim("m", "w")
    assert claim is not None
    assert claim.public_id == late.public_id
    entry = LogEntry.objects.get()
    assert (entry.change_message, entry.object_id) == ("Moved up.", str(late.pk))


def ids(text: str) -> list[int]:
    return [int(pk) for pk in re.findall(r"/admin/generations/generation/(\d+)/change/", text)]


def test_waiting_generations_are_listed_in_claim_order(
    admin: Client, api_key: Key, other_key: ApiKey
) -> None:
    create_generation(api_key[0])
    assert Generation.objects.claim("m", "w") is not None
    create_generation(other_key, model="another", status=Status.RUNNING)
    late = create_generation(api_key[0], service_class=ServiceClass.BACKGROUND)
    own, fair = create_generation(api_key[0]), create_generation(other_key)
    urgent = create_generation(api_key[0], service_class=ServiceClass.URGENT)
    shown = ids(admin.get(QUEUE).content.decode())
    waiting = [urgent, fair, own, late]
    assert shown[:4] == [one.pk for one in waiting]
    claim = Generation.objects.claim("m", "w")
    assert claim is not None
    assert claim.public_id == urgent.public_id


def test_one_model_does_not_hide_the_others(
    admin: Client, api_key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_page, "_MAX_ROWS", 2)
    many = [create_generation(api_key[0], model="a") for _ in range(3)]
    other = create_generation(api_key[0], model="b/c&d")
    text = admin.get(QUEUE).content.decode()
    assert ids(text) == [one.pk for one in many[:2]]
    address = f"{QUEUE}?model=b%2Fc%26d"
    assert f'href="{address.removeprefix(QUEUE)}"' in text
    text = admin.get(address).content.decode()
    assert ids(text) == [other.pk]
    action = f"{QUEUE}{other.pk}/?model=b%2Fc%26d"
    assert f'action="{action}"' in text
    assert admin.post(action, {"action": "up"})["Location"] == address


def test_moving_up_twice_and_unknown_actions_change_nothing(admin: Client, api_key: Key) -> None:
    waiting = create_generation(api_key[0])
    for what in ("up", "up", "sideways", ""):
        assert act(admin, waiting, what) == 302
    waiting.refresh_from_db()
    assert waiting.service_class == ServiceClass.URGENT
    assert [entry.change_message for entry in LogEntry.objects.all()] == ["Moved up."]


def test_a_waiting_generation_is_stopped_and_its_client_gets_an_error(
    admin: Client, api_key: Key
) -> None:
    waiting = create_generation(api_key[0])
    save_document(waiting.public_id, chat_document(waiting.public_id, "hi"), None)
    assert act(admin, waiting, "stop") == 302
    waiting.refresh_from_db()
    assert waiting.status == Status.CANCELLED
    ending = read_log(waiting.public_id)[-1].ending
    assert ending is not None
    assert ending.status == 400
    assert b"stopped_by_operator" in ending.body


def test_an_ended_generation_is_not_changed(admin: Client, api_key: Key) -> None:
    create_generation(api_key[0])
    claim = Generation.objects.claim("m", "w")
    assert claim is not None
    assert Generation.objects.finish(claim, Status.COMPLETED)
    ended = Generation.objects.get()
    for what in ("stop", "up"):
        act(admin, ended, what)
    ended.refresh_from_db()
    assert (ended.status, ended.service_class) == (Status.COMPLETED, ServiceClass.FOREGROUND)
    assert not LogEntry.objects.exists()


def test_a_user_with_view_permission_only_changes_nothing(
    staff: Callable[..., Client], api_key: Key
) -> None:
    waiting = create_generation(api_key[0])
    looker = staff("generations.view_generation")
    text = looker.get(QUEUE).content.decode()
    assert waiting.public_id[:18] in text
    assert 'value="stop"' not in text
    assert act(looker, waiting, "stop") == 403
    assert act(looker, waiting, "up") == 403
    assert staff().get(QUEUE).status_code == 403


def positions(text: str) -> list[tuple[int, int]]:
    """Return the generation and the position of each row that waits, in the order of the page."""
    waiting = text.split("Next in line", 1)[1].split("Running</h2>")[0]
    found = re.findall(r"/generation/(\d+)/change/.*?Position\"[^>]*>(\d+)<", waiting, re.DOTALL)
    return [(int(pk), int(position)) for pk, position in found]


@pytest.mark.parametrize("seed", range(2))
def test_positions_are_the_order_in_which_40_are_claimed(
    admin: Client, api_key: Key, other_key: ApiKey, seed: int
) -> None:
    """Slots are full; with each run that ends, the oldest, the next is claimed."""
    chance = random.Random(seed)
    third = create_key(Project.objects.create(name="third"), "third key")[0]
    keys = [api_key[0], other_key, third]
    for _ in range(4):
        create_generation(chance.choice(keys))
    served: list[int] = []

    def claim() -> Claim:
        found = Generation.objects.claim("m", "w", served)
        assert found is not None
        served[:] = [one for one in served if one != found.project_id] + [found.project_id]
        return found

    running = [claim() for _ in range(4)]
    classes = [ServiceClass.URGENT, ServiceClass.FOREGROUND, ServiceClass.BACKGROUND]
    for _ in range(40):
        key, class_ = chance.choice(keys), chance.choices(classes, [1, 8, 3])[0]
        create_generation(key, service_class=class_)
    shown = positions(admin.get(QUEUE).content.decode())
    assert [position for _, position in shown] == list(range(1, 41))
    order = []
    for _ in range(40):
        assert Generation.objects.finish(running.pop(0), Status.COMPLETED)
        running.append(claim())
        order.append(Generation.objects.get(public_id=running[-1].public_id).pk)
    assert [pk for pk, _ in shown] == order


def test_chosen_requests_are_stopped_at_once_and_each_is_logged(
    admin: Client, staff: Callable[..., Client], api_key: Key
) -> None:
    waiting = [create_generation(api_key[0]) for _ in range(4)]
    address = f"{QUEUE}stop/"
    looker = staff("generations.view_generation")
    chosen = {"chosen": [str(one.pk) for one in waiting[:3]]}
    assert looker.post(address, chosen).status_code == 403
    assert 'name="chosen"' not in looker.get(QUEUE).content.decode()
    assert admin.get(address).status_code == 405
    text = admin.post(address, chosen, follow=True).content.decode()
    assert "Stopping 3 requests…" in text
    states = [Generation.objects.get(pk=one.pk).status for one in waiting]
    assert states == [Status.CANCELLED] * 3 + [Status.QUEUED]
    assert LogEntry.objects.filter(change_message="Stopped.").count() == 3
    mixed = {"chosen": [*chosen["chosen"], str(waiting[3].pk), "x", "-1", "9" * 40, "0"]}
    text = admin.post(f"{address}?model=m", mixed, follow=True).content.decode()
    assert "Stopping 1 request…" in text
    assert "had ended before" in text
    assert "Choose requests first." in admin.post(address, follow=True).content.decode()


def test_what_was_not_stopped_for_want_of_redis_is_not_said_to_have_ended(
    admin: Client, api_key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(generation: Generation) -> bool:
        raise redis.exceptions.ConnectionError

    monkeypatch.setattr(queue_page, "stop", fail)
    chosen = {"chosen": [str(create_generation(api_key[0]).pk)]}
    text = admin.post(f"{QUEUE}stop/", chosen, follow=True).content.decode()
    assert "Not all were stopped: Redis is not reachable." in text
    assert "had ended before" not in text


def test_prompts_are_shown_only_to_those_who_may_see_content(
    admin: Client, staff: Callable[..., Client], api_key: Key
) -> None:
    create_generation(api_key[0])
    assert "Prompt" in cells(admin.get(QUEUE).content.decode())
    looker = staff("generations.view_generation")
    assert "Prompt" not in cells(looker.get(QUEUE).content.decode())
