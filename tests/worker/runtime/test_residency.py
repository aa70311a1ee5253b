"""Which model goes when there is no room for another."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from inference_site.catalogue.catalogue import DEMO_FILE
from inference_site.catalogue.model_files import FileFacts
from inference_site.core.domain.errors import EngineLoadError
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.host import Device
from worker.model_servers.memory import ServerMemory, keep_maximum, needed_bytes
from worker.model_servers.process import server_settings
from worker.runtime import residency, served_model
from worker.runtime.residency import Capacity, next_to_evict
from worker.runtime.served_model import ServedModel

MIB = 2**20
WANTED = ModelSpec("wanted", "scripted")


def loaded_model(id_: str, loaded: float = 100.0, used: float = 50.0, busy: int = 0) -> ServedModel:
    """A model that was loaded and used so many seconds ago, with so many busy slots."""
    model = ServedModel(ModelSpec(id_, "scripted"))
    model.loaded_at, model.used_at = time.monotonic() - loaded, time.monotonic() - used
    for _ in range(busy):
        model.reserve_slot()
    return model


def goes(*loaded: ServedModel, waited_for: tuple[str, ...] = (), wanted: ModelSpec = WANTED) -> str:
    found = next_to_evict(wanted, loaded, waited_for)
    return "" if found is None else found.spec.id


def test_the_idle_one_that_was_used_least_lately_goes_at_once() -> None:
    fresh = loaded_model("fresh", loaded=0.1, used=0.1)
    assert goes(loaded_model("a", used=20), loaded_model("b", used=30), fresh) == "b"
    assert goes(loaded_model("busy", busy=1), fresh) == "fresh"
    assert (
        goes(loaded_model("busy", busy=1), loaded_model("other"), waited_for=("other",)) == "busy"
    )


def test_one_that_is_used_keeps_its_place_for_its_time() -> None:
    a, b = loaded_model("a", loaded=9, busy=1), loaded_model("b", loaded=8, busy=1)
    assert goes(a, b) == ""
    b.spec = replace(b.spec, min_resident_s=5.0)
    assert goes(a, b) == "b"
    assert goes(loaded_model("a", loaded=11, busy=1), b) == "a"  # It has been there for longer.


def test_one_keeps_its_place_from_the_end_of_its_load_however_long_it_has_waited_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reading the facts of a large file takes as long as the loader waits for room."""
    model = ServedModel(ModelSpec("m", "scripted"))
    model.loaded_at -= 60
    evicted: list[str] = []

    def file_facts(_: ModelSpec) -> FileFacts:
        evicted.append(goes(*(m for m in (model,) if m.is_loaded), waited_for=("m",)))
        return {}

    monkeypatch.setattr(served_model, "file_facts", file_facts)
    model.load()
    assert model.is_loaded
    assert [*evicted, goes(model, waited_for=("m",))] == ["", ""]


def test_one_that_is_dropped_while_its_file_is_read_has_not_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = ServedModel(ModelSpec("m", "scripted"))

    def file_facts(_: ModelSpec) -> FileFacts:
        model.close()
        return {}

    monkeypatch.setattr(served_model, "file_facts", file_facts)
    model.load()
    assert not model.is_loaded
    assert not model.has_failed_to_load


def test_one_that_is_pinned_or_elsewhere_stays() -> None:
    pinned, remote = loaded_model("pinned"), loaded_model("remote")
    pinned.spec = replace(pinned.spec, is_pinned=True)
    remote.spec = replace(remote.spec, engine="openai_upstream")
    assert goes(pinned, remote) == ""


def test_a_number_of_models_is_kept_and_servers_elsewhere_do_not_count() -> None:
    room, loaded = Capacity(models=2), [loaded_model("a"), loaded_model("b")]
    assert not room.fits(WANTED, loaded)
    assert room.fits(WANTED, loaded[:1])
    loaded[0].spec = replace(loaded[0].spec, engine="openai_upstream")
    assert room.fits(WANTED, loaded)


def test_models_that_exclude_each_other_are_never_there_together() -> None:
    other, third = loaded_model("other", used=1), loaded_model("third", used=90)
    assert not Capacity().fits(replace(WANTED, exclusive_with=("other",)), [other])
    assert goes(other, third, wanted=replace(WANTED, exclusive_with=("other",))) == "other"
    other.spec = replace(other.spec, exclusive_with=("wanted",))
    assert not Capacity().fits(WANTED, [other])


def test_memory_is_what_was_seen_and_an_estimate_before_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_settings, "files", tmp_path)
    spec = ModelSpec("demo", "llama_cpp", DEMO_FILE, slots=2, context_length=512)
    estimate = needed_bytes(spec)
    assert 10 * MIB < estimate < 600 * MIB
    keep_maximum(spec, ServerMemory(40 * MIB))
    keep_maximum(spec, ServerMemory(30 * MIB))
    assert needed_bytes(spec) == 40 * MIB
    assert needed_bytes(replace(spec, slots=4)) != 40 * MIB  # That was not seen yet.
    assert Capacity(bytes=90 * MIB).fits(spec, [])
    beside = loaded_model("beside")
    beside.spec = replace(spec, id="beside")
    keep_maximum(beside.spec, ServerMemory(60 * MIB))
    assert not Capacity(bytes=90 * MIB).fits(spec, [beside])
    assert Capacity(bytes=101 * MIB).fits(spec, [beside])
    with pytest.raises(EngineLoadError, match=r"needs about 40 MiB .* may take 30 MiB"):
        Capacity(bytes=30 * MIB).fits(spec, [])


def test_on_gpus_what_is_free_there_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated: this machine need not have one."""
    monkeypatch.setattr(server_settings, "files", tmp_path)
    spec = ModelSpec("demo", "llama_cpp", DEMO_FILE, slots=2, context_length=512)
    keep_maximum(spec, ServerMemory(40 * MIB))
    keep_maximum(replace(spec, gpu_layers=0), ServerMemory(40 * MIB))
    monkeypatch.setattr(residency, "gpus", lambda: (Device("gpu", 100 * MIB, 30 * MIB),))
    assert not Capacity().fits(spec, [])
    assert Capacity().fits(replace(spec, gpu_layers=0), [])
    monkeypatch.setattr(residency, "gpus", lambda: (Device("gpu", 100 * MIB, 50 * MIB),))
    assert Capacity().fits(spec, [])


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
    keep_maximum(first, ServerMemory(5 * MIB, {0: 40 * MIB}))
    keep_maximum(second, ServerMemory(5 * MIB, {1: 40 * MIB}))
    keep_maximum(both, ServerMemory(5 * MIB, {0: 20 * MIB, 1: 20 * MIB}))
    assert not Capacity().fits(first, [])
    assert Capacity().fits(second, [])
    assert Capacity().fits(both, [])
    loaded = loaded_model("there")
    loaded.spec = second
    assert not Capacity(gpu_bytes=50 * MIB).fits(both, [loaded])
    assert Capacity(gpu_bytes=60 * MIB).fits(both, [loaded])
    with pytest.raises(EngineLoadError, match=r"about 40 MiB .* may take 35 MiB on GPU 1"):
        Capacity(gpu_bytes=35 * MIB).fits(second, [])
    keep_maximum(host, ServerMemory(10 * MIB))
    assert not Capacity(bytes=14 * MIB).fits(host, [loaded])
    assert not Capacity(bytes=16 * MIB).fits(host, [loaded], sleeping_bytes=2 * MIB)
    assert Capacity(bytes=16 * MIB).fits(host, [loaded])
