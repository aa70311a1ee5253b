"""``manage.py models`` and ``manage.py pull``; the latter against a stand-in of a hub."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
import redis.exceptions
from django.core.management import CommandError, call_command
from pytest_django.fixtures import Settings

from inference_site.catalogue import hub as hub_client
from inference_site.catalogue.catalogue import DEMO_FILE, catalogue
from inference_site.catalogue.fleet import fleet, leases
from inference_site.catalogue.fleet.leases import Lease, LiveView, LiveWorker, ModelReport, prune
from inference_site.catalogue.hub import Reference, downloaded
from inference_site.core.storage.redis import site_client
from inference_site.runs.queue import new_id
from tests.hub_server import Hub
from tests.ports import free_port


@pytest.fixture
def fresh_catalog() -> Iterator[None]:
    catalogue.cache_clear()
    yield
    catalogue.cache_clear()


@pytest.mark.usefixtures("fresh_catalog", "db")
def test_models_are_listed_with_the_memory_they_need(settings: Settings, tmp_path: Path) -> None:
    settings.MODELS_FILE = tmp_path / "models.yaml"
    settings.MODELS_FILE.write_text(
        f"models: {{one: {{file: {DEMO_FILE}, slots: 2}}, gone: {{file: x.gguf}}, "
        "play: {engine: scripted}}"
    )
    out = StringIO()
    call_command("models", stdout=out)
    _, one, gone, play, *_rest = out.getvalue().splitlines()
    assert one.split()[:4] == ["one", "llama_cpp", "2", "2,048"]
    assert "missing" in gone
    assert "scripted" in play
    assert "of memory is free" in out.getvalue()


@pytest.mark.usefixtures("fresh_catalog", "db")
def test_context_is_what_a_worker_announces_and_without_redis_that_of_the_entry(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.MODELS_FILE = tmp_path / "models.yaml"
    entries = "models: {far: {engine: scripted}, near: {engine: scripted, context_length: 64}}"
    settings.MODELS_FILE.write_text(entries)
    monkeypatch.setattr(fleet, "live_view", LiveView(ttl_s=0))
    worker = new_id("host:")
    reports = ModelReport("far", 4, 0, context_length=8192), ModelReport("other", 1, 0)
    Lease(worker, lambda: LiveWorker(worker, reports)).renew()

    def listed() -> dict[str, str]:
        out = StringIO()
        call_command("models", stdout=out, stderr=out)
        rows = [line.split() for line in out.getvalue().splitlines()]
        return {row[0]: row[3] for row in rows if row and row[0] in ("far", "near", "Redis")}

    try:
        assert listed() == {"far": "8,192", "near": "64"}
        monkeypatch.setattr(leases, "live_workers", _unreachable)
        assert listed() == {"Redis": "asked", "far": "2,048", "near": "64"}
    finally:
        site_client().delete(f"worker:{worker}")
        prune()


def _unreachable() -> list[LiveWorker]:
    raise redis.exceptions.ConnectionError


def test_file_is_checked_against_the_free_memory() -> None:
    out = StringIO()
    call_command("models", "check", str(DEMO_FILE), "--slots", "2", stdout=out)
    assert "architecture   llama" in out.getvalue()
    assert "quantisation   Q8_0" in out.getvalue()
    assert "for 2 slots of 2,048 tokens" in out.getvalue()
    with pytest.raises(CommandError, match="more than is free"):
        call_command("models", "check", str(DEMO_FILE), "--slots", "100000000", stdout=StringIO())


@pytest.mark.parametrize("option", ["--slots", "--context-length"])
@pytest.mark.parametrize("value", ["0", "-3", "many"])
def test_a_size_that_no_model_can_have_is_refused(option: str, value: str) -> None:
    with pytest.raises(CommandError, match=option):
        call_command("models", "check", str(DEMO_FILE), f"{option}={value}")


@pytest.mark.parametrize(
    "content", [b"", b"GGUF", b"no model at all", DEMO_FILE.read_bytes()[:3_000_000]]
)
def test_what_is_no_model_is_told(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    with pytest.raises(CommandError, match=r"m\.gguf: "):
        call_command("models", "check", str(file))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (
            "models:\n  a: {engine: scripted, slot: 3}\n",
            "models.yaml:2: models.a.slot: unknown key.",
        ),
        ("models:\n  a: [\n", "models.yaml:3: is not YAML: "),
        (
            "models:\n  a:\n    slots: 2\n    file: x.gguf\n",
            r"models.yaml:4: models.a: .*/x.gguf does not exist.",
        ),
        (
            f"models:\n  a: {{file: {DEMO_FILE}, draft_model: /x/draft.gguf}}\n",
            "models.yaml:2: models.a: /x/draft.gguf does not exist.",
        ),
        (
            "models:\n  a: {slots: 2}\n",
            "models.yaml:2: models.a: the engine llama_cpp needs a `file`.",
        ),
        (
            "models:\n  a:\n    file: cut.gguf\n",
            r"models.yaml:3: models.a: .*/cut.gguf: it is cut short: it has 3,000,000 of",
        ),
        ("models: {a: {engine: scripted}, A: {engine: scripted}}", "have one name"),
        ("models: {007: {file: x.gguf}}", r"models.yaml:1: models.007: .*/x.gguf does not exist."),
    ],
)
def test_a_mistake_in_a_models_file_is_told_with_its_line(
    tmp_path: Path, content: str, told: str
) -> None:
    (tmp_path / "cut.gguf").write_bytes(DEMO_FILE.read_bytes()[:3_000_000])
    (tmp_path / "models.yaml").write_text(content)
    with pytest.raises(CommandError, match=told) as caught:
        call_command("models", "check", str(tmp_path / "models.yaml"), stdout=StringIO())
    assert "\n" not in str(caught.value)


def test_a_good_models_file_is_told_and_its_models_are_listed(tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text(f"models: {{a: {{file: {DEMO_FILE}}}}}")
    out = StringIO()
    call_command("models", "check", str(tmp_path / "models.yaml"), stdout=out)
    assert out.getvalue().splitlines()[1].split()[:4] == ["a", "llama_cpp", "4", "2,048"]
    assert out.getvalue().endswith("models.yaml is good.\n")


@pytest.fixture
def hub() -> Iterator[Hub]:
    content = DEMO_FILE.read_bytes()
    with Hub(
        {"README.md": b"#", "tiny.Q8_0.gguf": content, "tiny.Q4_K_M.gguf": b"G"}
    ).running() as served:
        yield served


@pytest.fixture
def models(hub: Hub, tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of models of this process, which asks the stand-in."""
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    settings.MODELS_DIR = tmp_path / "models"
    return tmp_path / "models"


@pytest.mark.parametrize("reference", ["hf:org/repo/tiny.Q8_0.gguf", "org/repo:q8_0"])
def test_file_is_fetched_and_checked(hub: Hub, models: Path, reference: str) -> None:
    out = StringIO()
    call_command("pull", reference, stdout=out)
    file = models / "org" / "repo" / "tiny.Q8_0.gguf"
    assert file.read_bytes() == hub.files["tiny.Q8_0.gguf"]
    assert str(file) in out.getvalue()
    assert "file: hf:org/repo/tiny.Q8_0.gguf" in out.getvalue()
    assert downloaded(Reference.read(reference), models) == file
    call_command("pull", reference, stdout=out)  # Nothing is fetched again.
    assert hub.ranges == []


def test_parts_of_a_split_model_are_all_fetched(hub: Hub, models: Path) -> None:
    hub.files = {f"big-Q4_K_M-0000{n}-of-00003.gguf": b"GGUF%d" % n for n in (1, 2, 3)}
    hub.files["mmproj-Q4_K_M.gguf"] = b"projector"
    call_command("pull", "org/repo", stdout=StringIO())
    there = {path.name: path.read_bytes() for path in (models / "org/repo").iterdir()}
    assert there == {name: data for name, data in hub.files.items() if "mmproj" not in name}


def test_download_that_is_cut_goes_on_where_it_ended(
    hub: Hub, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, as long as each connection brings some of it, and with the next pull."""
    monkeypatch.setattr(hub_client, "_RETRY_S", 0.0)
    hub.cut_after = hub.cut_next = 500_000
    call_command("pull", "org/repo:Q8_0", stdout=StringIO())
    assert hub.ranges == [f"bytes={n * 500_000}-" for n in range(1, 8)]
    assert (models / "org/repo/tiny.Q8_0.gguf").read_bytes() == hub.files["tiny.Q8_0.gguf"]


def test_download_of_which_nothing_comes_any_more_goes_on_with_the_next_pull(
    hub: Hub, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_client, "_RETRY_S", 0.0)
    hub.cut_after, hub.cut_next = 1_000_000, 0
    with pytest.raises(CommandError, match="does not answer: peer closed connection"):
        call_command("pull", "org/repo:Q8_0", stdout=StringIO())
    assert hub.ranges == ["bytes=1000000-"] * 2
    hub.cut_after = hub.cut_next = None
    call_command("pull", "org/repo:Q8_0", stdout=StringIO())
    assert hub.ranges == ["bytes=1000000-"] * 3
    assert (models / "org/repo/tiny.Q8_0.gguf").read_bytes() == hub.files["tiny.Q8_0.gguf"]


def test_damaged_file_is_removed(hub: Hub, models: Path) -> None:
    hub.tags["tiny.Q8_0.gguf"] = "0" * 64
    with pytest.raises(CommandError, match="its SHA-256 is"):
        call_command("pull", "org/repo:Q8_0", stdout=StringIO())
    assert list((models / "org/repo").iterdir()) == []


def test_token_of_the_hub_may_be_in_a_file(
    hub: Hub, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.token = "hf-secret"
    with pytest.raises(CommandError, match=r"needs a token in HF_TOKEN \(401"):
        call_command("pull", "org/repo:Q8_0")
    monkeypatch.setenv("HF_TOKEN_FILE", str(tmp_path / "token"))
    with pytest.raises(CommandError, match=r"^HF_TOKEN_FILE: No such file or directory: "):
        call_command("pull", "org/repo:Q8_0")
    (tmp_path / "token").write_text("hf-secret\n")
    call_command("pull", "org/repo:Q8_0")
    assert (models / "org/repo/tiny.Q8_0.gguf").exists()


def test_a_file_that_another_process_fetches_is_left_to_it(models: Path) -> None:
    (models / "org/repo").mkdir(parents=True)
    with (models / "org/repo/tiny.Q8_0.gguf.part").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(CommandError, match="is being fetched by another process"):
            call_command("pull", "org/repo:Q8_0", stdout=StringIO())


@pytest.mark.parametrize(
    ("reference", "told"),
    [
        ("tiny.gguf", "expected owner/name:Q4_K_M"),
        ("hf:org/repo/../x.gguf", "expected owner/name:Q4_K_M"),
        ("org/repo/other.gguf", "org/repo has no file other.gguf"),
        ("org/repo", "has several models; there are: tiny.Q4_K_M.gguf, tiny.Q8_0.gguf"),
        ("org/repo:Q4_K", "has no model of Q4_K; there are: tiny.Q4_K_M.gguf, tiny.Q8_0.gguf"),
        ("org/other:Q8_0", r"org/other does not exist, or needs a token .*\(404 from 127.0.0.1\)"),
    ],
)
@pytest.mark.usefixtures("models")
def test_what_cannot_be_fetched_is_told_in_one_line(reference: str, told: str) -> None:
    with pytest.raises(CommandError, match=told) as caught:
        call_command("pull", reference, stdout=StringIO())
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("models")
def test_a_hub_that_is_not_reached_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(CommandError, match=r"^http://127.0.0.1:\d+ does not answer: .*refused"):
        call_command("pull", "org/repo:Q8_0", stdout=StringIO())
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("listing", ['{"error": "down"}', "[1]", '[{"type": "file"}]', "<p>"])
@pytest.mark.usefixtures("models")
def test_a_server_that_is_no_hub_is_told_in_one_line(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, listing: str
) -> None:
    """JSON that is no list of files was a traceback, and HTML "Expecting value: line 1"."""
    monkeypatch.setattr(hub, "listing", listing.encode)
    with pytest.raises(CommandError, match=r"^http://\S+ answers with no list of files") as caught:
        call_command("pull", "org/repo:Q8_0", stdout=StringIO())
    assert "\n" not in str(caught.value)
