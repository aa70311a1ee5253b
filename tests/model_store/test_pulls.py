"""Pulls in a worker: told of, stopped, taken over from a worker that is gone, and refused."""

from __future__ import annotations

import errno
import fcntl
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from inference_site.catalogue import hub as hub_client
from inference_site.catalogue.catalogue import DEMO_FILE
from inference_site.catalogue.fleet.leases import Lease, LiveWorker
from inference_site.catalogue.model_store.models import Pull, PullState, StoredModel
from inference_site.core.storage.redis import site_client
from tests.hub_server import Hub
from worker.runtime import pulls
from worker.runtime.pulls import Pulls

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("models_dir")]
FILE = "org/repo/tiny.Q8_0.gguf"


def ended(**fields: Any) -> Pull:
    """A pull that a worker was given the chance to do."""
    pull = Pull.objects.create(**{"reference": "org/repo:Q8_0", **fields})
    assert Pulls("w").run_next()
    pull.refresh_from_db()
    return pull


def test_a_model_is_fetched_told_of_and_kept(models_dir: Path) -> None:
    pull = ended(model_id="tiny")
    assert (pull.state, pull.model_id, pull.error) == (PullState.COMPLETED, "tiny", "")
    assert pull.have_bytes == pull.size_bytes == DEMO_FILE.stat().st_size
    assert (models_dir / FILE).read_bytes() == DEMO_FILE.read_bytes()
    assert StoredModel.objects.get().entry == {"file": f"hf:{FILE}"}
    assert not Pulls("w").run_next()


@pytest.mark.parametrize(
    ("reference", "told"),
    [
        ("org/repo:Q2_K", "has no model of Q2_K"),
        ("org/other", "does not exist, or needs a token"),
        ("../../etc", "is no model"),
    ],
)
def test_what_cannot_be_fetched_is_told(reference: str, told: str) -> None:
    pull = ended(reference=reference)
    assert pull.state == PullState.FAILED
    assert told in pull.error
    assert not StoredModel.objects.exists()


def test_a_file_outside_of_the_folder_is_refused(hub: Hub, models_dir: Path) -> None:
    hub.files = {"../../../evil.gguf": b"GGUF"}
    pull = ended(reference="org/repo")
    assert pull.state == PullState.FAILED
    assert "outside of it" in pull.error
    assert not [*models_dir.parent.rglob("evil*")]


ELF = b"\x7fELF" + b"x" * 4_000_000


@pytest.mark.parametrize(
    ("files", "reference", "told"),
    [
        ({"evil.so": ELF}, "org/repo/evil.so", "evil.so is no model file: only .gguf"),
        ({"evil.py": b"x"}, "org/repo/evil.py", "evil.py is no model file: only .gguf"),
        ({"t.jinja": b"x"}, "org/repo/t.jinja", "t.jinja is no model file: only .gguf"),
        ({"evil.gguf": ELF}, "org/repo", "evil.gguf is no model file: it is neither"),
        ({"evil.bin": b"PK\x03\x04"}, "org/repo/evil.bin", "evil.bin is no model file: it is"),
        ({"mmproj-x.gguf": ELF}, "org/repo/mmproj-x.gguf", "mmproj-x.gguf is no model file"),
        (
            {"m-1-of-2.gguf": b"GGUF", "m-2-of-2.gguf": ELF},
            "org/repo",
            "m-2-of-2.gguf is no model file",
        ),
        ({"empty.gguf": b""}, "org/repo", "empty.gguf is no model file"),
    ],
)
def test_what_is_no_model_file_does_not_get_its_name(
    hub: Hub, models_dir: Path, files: dict[str, bytes], reference: str, told: str
) -> None:
    hub.files = files
    pull = ended(reference=reference)
    assert pull.state == PullState.FAILED
    assert pull.error.startswith(told)
    assert pull.have_bytes < 1_000_000, "it is noticed at its beginning"
    assert not [path for path in models_dir.rglob("*") if path.is_file()]
    assert not StoredModel.objects.exists()


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("demo.gguf", "org/repo/demo.gguf is downloaded, but demo is the ID of another model"),
        ("KEPT.gguf", "org/repo/KEPT.gguf is downloaded, but kept is the ID of another model"),
        ("other.gguf", "org/repo/other.gguf is downloaded, but other is the ID of another model"),
        ("a file.gguf", "org/repo/a file.gguf is downloaded, but 'a file' cannot be an ID"),
        (f"{'x' * 230}.gguf", "cannot be an ID"),
    ],
)
def test_a_pulled_file_takes_the_name_of_no_other_model(
    hub: Hub, models_dir: Path, file: str, told: str
) -> None:
    (models_dir / "mine").mkdir(parents=True)
    (models_dir / "mine" / "other.gguf").write_bytes(DEMO_FILE.read_bytes())
    kept = StoredModel.objects.create(model_id="kept", entry={"file": "mine/other.gguf"})
    hub.files = {file: DEMO_FILE.read_bytes()}
    pull = ended(reference="org/repo")
    assert pull.state == PullState.FAILED
    assert told in pull.error
    assert (models_dir / "org" / "repo" / file).exists()
    assert [*StoredModel.objects.values_list("model_id", "entry")] == [("kept", kept.entry)]


def test_the_entry_of_a_file_stays_when_that_is_pulled_again() -> None:
    assert ended(model_id="tiny").state == PullState.COMPLETED
    entry = {"file": FILE, "slots": 2}
    StoredModel.objects.update(entry=entry)
    assert ended(model_id="tiny").state == PullState.COMPLETED
    assert StoredModel.objects.get().entry == entry


@pytest.mark.parametrize("name", ["nul\0", "half \ud800", "x" * 5000])
def test_names_in_a_hub_keep_no_pull_from_its_end(hub: Hub, name: str) -> None:
    hub.files = {f"{name}{n}.gguf": b"GGUF" for n in range(2)}
    hub.tags = dict.fromkeys(hub.files, "")
    pull = ended(reference="org/repo")
    assert pull.state == PullState.FAILED
    assert pull.error.startswith("org/repo has several models; there are: ")
    assert not Pulls("w").run_next()


def test_what_was_fetched_before_is_looked_at_again(hub: Hub, models_dir: Path) -> None:
    hub.files = {"evil.gguf": ELF}
    (models_dir / "org" / "repo").mkdir(parents=True)
    (models_dir / "org" / "repo" / "evil.gguf").write_bytes(ELF)
    assert "is no model file" in ended(reference="org/repo").error
    assert not StoredModel.objects.exists()


def test_a_file_that_the_hub_has_changed_stays_until_the_new_one_is_whole(
    hub: Hub, models_dir: Path
) -> None:
    kept, new = models_dir / FILE, DEMO_FILE.read_bytes()
    kept.parent.mkdir(parents=True)
    true_listing = hub.listing()
    hub.listing = lambda: true_listing  # type: ignore[method-assign]  # It lies.
    for old in (new[:-1], new + b"x", new[:-1] + bytes([new[-1] ^ 1])):
        kept.write_bytes(old)
        hub.files["tiny.Q8_0.gguf"] = new[:-8] + b"corrupt!"
        assert "its SHA-256 is" in ended().error
        assert kept.read_bytes() == old
        hub.files["tiny.Q8_0.gguf"] = new
        assert ended().state == PullState.COMPLETED
        assert kept.read_bytes() == new
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]


def test_an_unfinished_file_that_is_longer_than_the_hubs_is_fetched_anew(models_dir: Path) -> None:
    part = models_dir / f"{FILE}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(DEMO_FILE.read_bytes() + b"of another revision")
    assert ended().state == PullState.COMPLETED
    assert (models_dir / FILE).read_bytes() == DEMO_FILE.read_bytes()


def test_a_hub_that_sends_more_than_it_said_is_cut_off(hub: Hub, models_dir: Path) -> None:
    true_listing = hub.listing()
    hub.files["tiny.Q8_0.gguf"] += b"x" * 4_000_000
    hub.listing = lambda: true_listing  # type: ignore[method-assign]  # It lies.
    pull = ended()
    assert "sends more than its" in pull.error


def test_a_full_disk_is_told(monkeypatch: pytest.MonkeyPatch, models_dir: Path) -> None:
    none = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: none)
    assert "and the disk has 1,000" in ended().error

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hub_client, "_download", full)
    assert ended().error.startswith("No space left on device, on ")


def test_a_pull_is_stopped_and_another_goes_on_from_there(
    monkeypatch: pytest.MonkeyPatch, hub: Hub, models_dir: Path
) -> None:
    monkeypatch.setattr(pulls, "_STORE_S", 0.0)
    move = Pull.objects.move

    def stopped_meanwhile(pull: Pull, state: PullState, **facts: Any) -> bool:
        Pull.objects.cancel(pull.pk)
        return move(pull, state, **facts)

    monkeypatch.setattr(Pull.objects, "move", stopped_meanwhile)
    assert ended().state == PullState.CANCELLED
    part = models_dir / f"{FILE}.part"
    assert 0 < part.stat().st_size < DEMO_FILE.stat().st_size
    assert not StoredModel.objects.exists()
    monkeypatch.undo()
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    assert not Pulls("w").run_next()


def test_a_pull_that_is_stopped_while_its_file_is_checked_adds_no_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The check of a large file takes minutes."""
    digest = hub_client._digest

    def stopped_meanwhile(path: Path, file: hub_client.HubFile) -> str:
        Pull.objects.cancel(Pull.objects.get().pk)
        return digest(path, file)

    monkeypatch.setattr(hub_client, "_digest", stopped_meanwhile)
    assert ended().state == PullState.CANCELLED
    assert not StoredModel.objects.exists()


def test_a_pull_that_is_stopped_just_before_its_model_is_stored_adds_no_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pull was shown as cancelled, and the model was served."""

    def stopped_meanwhile(*_: object) -> bool:
        Pull.objects.cancel(Pull.objects.get().pk)
        return False

    monkeypatch.setattr(pulls, "_is_of_another_file", stopped_meanwhile)
    assert ended().state == PullState.CANCELLED
    assert not StoredModel.objects.exists()


def test_a_pull_of_a_worker_that_is_gone_is_taken_over_and_of_one_that_lives_is_not() -> None:
    lease = Lease("alive", lambda: LiveWorker("alive"))
    lease.renew()
    try:
        kept = Pull.objects.create(reference="a/b", state=PullState.RUNNING, worker="alive")
        assert not Pulls("w").run_next()
        assert ended(state=PullState.RUNNING, worker="dead").state == PullState.COMPLETED
    finally:
        lease.stop()
        site_client().srem("workers", "alive")
    kept.refresh_from_db()
    assert (kept.worker, kept.state) == ("alive", PullState.RUNNING)


def test_a_pull_waits_while_the_worker_that_had_it_still_writes_the_file(models_dir: Path) -> None:
    part = models_dir / f"{FILE}.part"
    part.parent.mkdir(parents=True)
    with part.open("ab") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        pull = ended(state=PullState.RUNNING, worker="has lost its lease")
        assert (pull.state, pull.worker, pull.error) == (PullState.RUNNING, "w", "")
    assert Pulls("w").run_next()
    pull.refresh_from_db()
    assert pull.state == PullState.COMPLETED


@pytest.mark.parametrize("is_completed", [True, False])
def test_a_pull_does_not_write_a_file_that_another_process_has_just_renamed_or_removed(
    monkeypatch: pytest.MonkeyPatch, models_dir: Path, is_completed: bool
) -> None:
    """It had opened the file, and got the lock when the other process was done: it failed."""
    part, flock = models_dir / f"{FILE}.part", fcntl.flock

    def end_first(opened: Any, how: int) -> None:
        if is_completed:
            shutil.copy(DEMO_FILE, part)
            part.rename(models_dir / FILE)
        else:
            part.unlink()
        flock(opened, how)

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", end_first)
        pull = ended()
    assert (pull.state, pull.error) == (PullState.RUNNING, "")
    assert Pulls("w").run_next()
    pull.refresh_from_db()
    assert pull.state == PullState.COMPLETED
    assert (models_dir / FILE).read_bytes() == DEMO_FILE.read_bytes()


def test_two_workers_never_take_the_same_pull() -> None:
    for _ in range(4):
        Pull.objects.create(reference="a/b")
    taken: list[int] = []

    def take(name: str) -> None:
        from django.db import connection

        while pull := Pull.objects.claim(name, "host", ["one", "two"]):
            taken.append(pull.pk)
        connection.close()

    threads = [threading.Thread(target=take, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == sorted(set(taken)) == sorted(Pull.objects.values_list("pk", flat=True))


def test_a_pull_for_another_host_is_left_to_it() -> None:
    Pull.objects.create(reference="a/b", host="elsewhere")
    assert not Pulls("w").run_next()
