"""Slots that background work leaves free while clients use a model."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from inference_site.runs.models import Claim, ServiceClass
from worker.runtime import served_model
from worker.runtime.served_model import ClientSlots


def of(service_class: ServiceClass) -> Claim:
    return Claim("chatcmpl-1", "chat.completion", 1, "worker", service_class=service_class)


BACKGROUND, CLIENT = of(ServiceClass.BACKGROUND), of(ServiceClass.FOREGROUND)


def claim(slots: ClientSlots, claimed: Claim | None) -> bool:
    """Claim this; whether it might have been background work."""
    entered = slots.enter()
    slots.claimed(claimed, has_entered=entered)
    return entered


@pytest.mark.parametrize(
    ("slots", "percent", "most"),
    [
        (8, 12, 7),
        (16, 12, 14),
        (2, 12, 1),
        (8, 25, 6),
        (4, 25, 3),
        (3, 25, 2),
        (2, 25, 1),
        (8, 0, 8),
    ],
)
def test_a_part_is_kept_once_a_client_has_come(
    settings: Any, slots: int, percent: int, most: int
) -> None:
    settings.CLIENT_SLOTS_PERCENT = percent
    kept = ClientSlots(slots)
    assert claim(kept, CLIENT)
    assert [claim(kept, BACKGROUND) for _ in range(most)] == [True] * most
    assert not claim(kept, None)
    kept.leave(BACKGROUND)
    assert claim(kept, BACKGROUND)


def test_a_model_with_one_slot_runs_everything(settings: Any) -> None:
    settings.CLIENT_SLOTS_PERCENT = 25
    slots = ClientSlots(1)
    assert claim(slots, CLIENT)
    assert claim(slots, BACKGROUND)


def test_all_slots_are_for_background_work_without_clients(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.CLIENT_SLOTS_PERCENT = 25
    slots = ClientSlots(4)
    assert all(claim(slots, BACKGROUND) for _ in range(4))
    assert claim(slots, CLIENT)
    assert not claim(slots, None)
    monkeypatch.setattr(served_model, "_CLIENTS_S", 0.01)
    time.sleep(0.02)
    assert claim(slots, None)


def test_a_run_that_calls_tools_has_no_place_meanwhile(settings: Any) -> None:
    settings.CLIENT_SLOTS_PERCENT = 50
    slots = ClientSlots(2)
    assert claim(slots, CLIENT)
    assert claim(slots, BACKGROUND)
    assert not claim(slots, None)
    slots.leave(BACKGROUND)
    assert claim(slots, None)
    slots.resume(BACKGROUND)
    assert not claim(slots, None)


def test_concurrent_claims_do_not_take_the_kept_slots(settings: Any) -> None:
    settings.CLIENT_SLOTS_PERCENT = 25
    slots, begun = ClientSlots(8), []
    claim(slots, CLIENT)

    def run() -> None:
        for _ in range(100):
            if slots.enter():
                begun.append(1)
                time.sleep(0)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(begun) == 6
