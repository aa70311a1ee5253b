"""Which model goes when there is no room for another."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from inference_site.catalogue.catalogue import DEMO_FILE
from inference_site.domain.device import Device
from inference_site.domain.errors import EngineLoadError
from inference_site.domain.model_spec import ModelSpec
from worker.engines import own_server
from worker.engines.own_server import Taken, server_settings
from worker.runtime import residency
from worker.runtime.residency import Room, needed_bytes, next_to_go

MIB = 2**20
WANTED = ModelSpec("wanted", "scripted")


@dataclass
class Loaded:
    """A model that is loaded; times are seconds ago."""

    id: str
    loaded: float = 100.0
    used: float = 50.0
    busy: int = 0
    spec: ModelSpec = field(init=False)

    def __post_init__(self) -> None:
        self.spec = ModelSpec(self.id, "scripted")

    @property
    def loaded_at(self) -> float:
        return time.monotonic() - self.loaded

    @property
    def used_at(self) -> float:
        return time.monotonic() - self.used


def goes(*loaded: Loaded, waited_for: tuple[str, ...] = (), wanted: ModelSpec = WANTED) -> str:
    found = next_to_go(wanted, loaded, waited_for)
    return "" if found is None else found.spec.id


def test_the_idle_one_that_was_used_least_lately_goes_at_once() -> None:
    fresh = Loaded("fresh", loaded=0.1, used=0.1)
    assert goes(Loaded("a", used=20), Loaded("b", used=30), fresh) == "b"
    assert goes(Loaded("busy", busy=1), fresh) == "fresh"
    assert goes(Loaded("busy", busy=1), Loaded("other"), waited_for=("other",)) == "busy"


def test_one_that_is_used_keeps_its_place_for_its_time() -> None:
    a, b = Loaded("a", loaded=9, busy=1), Loaded("b", loaded=8, busy=1)
    assert goes(a, b) == ""
    b.spec = replace(b.spec, min_resident_s=5.0)
    assert goes(a, b) == "b"
    assert goes(Loaded("a", loaded=11, busy=1), b) == "a"  # It has been there for longer.


def test_one_that_is_pinned_or_elsewhere_stays() -> None:
    pinned, remote = Loaded("pinned"), Loaded("remote")
    pinned.spec = replace(pinned.spec, is_pinned=True)
    remote.spec = replace(remote.spec, engine="openai_upstream")
    assert goes(pinned, remote) == ""


def test_a_number_of_models_is_kept_and_servers_elsewhere_do_not_count() -> None:
    room, loaded = Room(models=2), [Loaded("a"), Loaded("b")]
    assert room.lacks(WANTED, loaded)
    assert not room.lacks(WANTED, loaded[:1])
    loaded[0].spec = replace(loaded[0].spec, engine="openai_upstream")
    assert not room.lacks(WANTED, loaded)


def test_models_that_exclude_each_other_are_never_there_together() -> None:
    other, third = Loaded("other", used=1), Loaded("third", used=90)
    assert Room().lacks(replace(WANTED, exclusive_with=("other",)), [other])
    assert goes(other, third, wanted=replace(WANTED, exclusive_with=("other",))) == "other"
    other.spec = replace(other.spec, exclusive_with=("wanted",))
    assert Room().lacks(WANTED, [other])


def test_memory_is_what_was_seen_and_an_estimate_before_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_settings, "files", tmp_path)
    spec = ModelSpec("demo", "llama_cpp", DEMO_FILE, slots=2, context_length=512)
    estimate = needed_bytes(spec)
    assert 10 * MIB < estimate < 600 * MIB
    own_server._keep_learnt(spec, Taken(40 * MIB))
    own_server._keep_learnt(spec, Taken(30 * MIB))
    assert needed_bytes(spec) == 40 * MIB
    assert needed_bytes(replace(spec, slots=4)) != 40 * MIB  # That was not seen yet.
    assert not Room(bytes=90 * MIB).lacks(spec, [])
    beside = Loaded("beside")
    beside.spec = replace(spec, id="beside")
    own_server._keep_learnt(beside.spec, Taken(60 * MIB))
    assert Room(bytes=90 * MIB).lacks(spec, [beside])
    assert not Room(bytes=101 * MIB).lacks(spec, [beside])
    with pytest.raises(EngineLoadError, match=r"needs about 40 MiB .* may take 30 MiB"):
        Room(bytes=30 * MIB).lacks(spec, [])


def test_on_gpus_what_is_free_there_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated: this machine need not have one."""
    monkeypatch.setattr(server_settings, "files", tmp_path)
    spec = ModelSpec("demo", "llama_cpp", DEMO_FILE, slots=2, context_length=512)
    own_server._keep_learnt(spec, Taken(40 * MIB))
    own_server._keep_learnt(replace(spec, gpu_layers=0), Taken(40 * MIB))
    monkeypatch.setattr(residency, "gpus", lambda: (Device("gpu", 100 * MIB, 30 * MIB),))
    assert Room().lacks(spec, [])
    assert not Room().lacks(replace(spec, gpu_layers=0), [])
    monkeypatch.setattr(residency, "gpus", lambda: (Device("gpu", 100 * MIB, 50 * MIB),))
    assert not Room().lacks(spec, [])


def test_on_gpus_what_was_seen_on_each_counts_and_what_the_settings_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulated: this machine need not have one."""
    monkeypatch.setattr(server_settings, "files", tmp_path)
    free = [30 * MIB, 80 * MIB]
    monkeypatch.setattr(
        residency, "gpus", lambda: tuple(Device("gpu", 100 * MIB, each) for each in free)
    )
    first, second = (
        ModelSpec(f"on-{index}", "command", options={"gpus": [index]}) for index in (0, 1)
    )
    both = ModelSpec("on-both", "command", options={"gpus": [0, 1]})
    host = ModelSpec("on-the-host", "command", options={"gpus": []})
    own_server._keep_learnt(first, Taken(5 * MIB, {0: 40 * MIB}))
    own_server._keep_learnt(second, Taken(5 * MIB, {1: 40 * MIB}))
    own_server._keep_learnt(both, Taken(5 * MIB, {0: 20 * MIB, 1: 20 * MIB}))
    assert Room().lacks(first, [])
    assert not Room().lacks(second, [])
    assert not Room().lacks(both, [])
    loaded = Loaded("there")
    loaded.spec = second
    assert Room(gpu_bytes=50 * MIB).lacks(both, [loaded])
    assert not Room(gpu_bytes=60 * MIB).lacks(both, [loaded])
    with pytest.raises(EngineLoadError, match=r"about 40 MiB .* may take 35 MiB on GPU 1"):
        Room(gpu_bytes=35 * MIB).lacks(second, [])
    own_server._keep_learnt(host, Taken(10 * MIB))
    assert Room(bytes=14 * MIB).lacks(host, [loaded])
    assert Room(bytes=16 * MIB).lacks(host, [loaded], asleep=2 * MIB)
    assert not Room(bytes=16 * MIB).lacks(host, [loaded])
