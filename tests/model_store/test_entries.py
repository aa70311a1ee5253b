"""Entries in the database: what is refused, which of two models of one name wins, and changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from pytest_django.fixtures import Settings

from inference_site.catalogue.catalogue import Catalogue, catalogue
from inference_site.catalogue.models_file import read_models_file
from inference_site.catalogue.operator_settings import BadKey
from inference_site.console.model_pages.entry_fields import (
    HIDDEN,
    changes,
    entry_of,
    form_values,
    hidden,
)
from inference_site.doctor.fleet import check_models
from inference_site.domain.model_spec import ModelSpec, Price
from inference_site.model_store.entries import StoredSpecs, read_stored_entry
from inference_site.model_store.models import StoredModel
from inference_site.model_store.sealed_entries import opened, sealed
from inference_site.model_store.watching import wanted_specs

ENTRY = {
    "engine": "openai_upstream",
    "base_url": "http://a/v1",
    "api_key": "sk-secret",
    "headers": {"X-Team": "hush"},
    "price": {"input": 1.5, "output": 2.0},
    "aliases": ["one", "two"],
    "slots": 3,
}


@pytest.mark.parametrize(
    ("entry", "path", "told"),
    [
        ({"file": "../x.gguf"}, ("file",), "not in the directory of models"),
        ({"file": "/etc/passwd"}, ("file",), "not in the directory of models"),
        ({"file": "a.gguf", "mmproj": "/etc/passwd"}, ("mmproj",), "not in the directory"),
        ({"file": "a.gguf", "slots": 0}, ("slots",), "greater than 0"),
        ({"engine": "none"}, ("engine",), "unknown engine"),
        ({"engine": "scripted", "slot": 1}, ("slot",), "unknown key"),
        ({**ENTRY, "api_key_env": "SECRET_KEY"}, ("api_key_env",), "only the models file"),
        ({**ENTRY, "api_key_file": "key"}, ("api_key_file",), "only the models file"),
    ],
)
def test_an_entry_that_is_wrong_is_refused(
    entry: dict[str, Any], path: tuple[str, ...], told: str
) -> None:
    with pytest.raises(BadKey, match=told) as caught:
        read_stored_entry("m", entry)
    assert caught.value.path == path


def test_an_entry_means_what_it_means_in_the_models_file(tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text(yaml.safe_dump({"models": {"m": ENTRY}}))
    assert [read_stored_entry("m", ENTRY)] == read_models_file(tmp_path / "models.yaml")


def test_the_form_gives_back_the_entry_and_shows_no_secret() -> None:
    values = form_values(ENTRY)
    assert "sk-secret" not in str(values)
    assert "hush" not in str(values)
    assert entry_of(values, ENTRY) == ENTRY
    moved = {**values, "more": values["more"].replace("http://a/", "http://evil/")}
    with pytest.raises(BadKey, match="write it again"):
        entry_of(moved, ENTRY)


def test_the_audit_log_has_old_and_new_values_and_no_secret() -> None:
    after = {**ENTRY, "slots": 5, "api_key": "sk-other", "price": {"input": 2.0}}
    told = changes(ENTRY, after)
    assert "slots: 3 → 5" in told
    assert "api_key changed" in told
    assert "sk-" not in told
    assert hidden(ENTRY)["headers"] == {"X-Team": HIDDEN}


@pytest.mark.parametrize(
    "more",
    ["[1]", "a: [", "a: &x 1\nb: *x", "slots: 1", "x" * 30_000, "[" * 5_000, "!!python/name:os"],
)
def test_more_settings_that_are_no_mapping_of_yaml_are_refused(more: str) -> None:
    with pytest.raises(BadKey):
        entry_of({"more": more, "is_listed": True}, {})


def spec(id_: str, **fields: Any) -> ModelSpec:
    return ModelSpec(id_, "scripted", **fields)


def test_the_models_file_wins_over_the_database_and_that_over_the_folder() -> None:
    known = Catalogue([spec("file", aliases=("f",))], found=[spec("found"), spec("both", slots=1)])
    changed = known.update(
        [spec("file", slots=9), spec("both", slots=2), spec("new"), spec("bad", aliases=("f",))]
    )
    assert [one.id for one in changed.new] == ["new"]
    assert [(old.slots, new.slots) for old, new in changed.changed] == [(1, 2)]
    assert list(known.models) == ["file", "both", "new", "found"]
    assert known.models["file"].slots == 8
    assert (known.is_fixed("file"), known.is_stored("file"), known.is_stored("both")) == (
        True,
        False,
        True,
    )
    assert not known.update()  # The database cannot be asked: nothing changes.
    gone = known.update([])
    assert [one.id for one in gone.gone] == ["new"]
    assert known.models["both"].slots == 1
    assert known.find("new") is None


def test_only_what_the_engine_heeds_has_a_model_loaded_again() -> None:
    old = spec("m")
    priced = replace(old, price=Price(1, 1, 1), aliases=("x",), is_listed=False, projects=("p",))
    assert not priced.runs_otherwise_than(old)
    assert replace(old, slots=2).runs_otherwise_than(old)
    assert replace(old, options={"a": 1}).runs_otherwise_than(old)


def test_secrets_are_sealed_and_opened_with_the_key_of_the_site_only(settings: Settings) -> None:
    kept = sealed(ENTRY)
    assert "sk-secret" not in str(kept)
    assert "hush" not in str(kept)
    assert opened(kept) == opened(sealed(kept)) == ENTRY
    assert kept["base_url"] == ENTRY["base_url"]
    assert read_stored_entry("m", kept) == read_stored_entry("m", ENTRY)
    settings.SECRET_KEY = "another" * 9
    with pytest.raises(BadKey, match="write it again") as caught:
        read_stored_entry("m", kept)
    assert caught.value.path == ("api_key",)


@pytest.fixture
def stored_model(db: None) -> Iterator[str]:
    catalogue.cache_clear()
    StoredModel.objects.create(model_id="kept", entry={"engine": "scripted", "aliases": ["k"]})
    yield "kept"
    catalogue.cache_clear()


def test_a_worker_starts_with_a_model_of_the_database(
    stored_model: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert [spec.id for spec in wanted_specs(["demo", "k"])] == ["demo", stored_model]
    assert caplog.text == "", "`serve` prints it among its own lines"


@pytest.mark.django_db
def test_a_name_that_the_database_does_not_have_either_is_refused_at_once() -> None:
    catalogue.cache_clear()
    with pytest.raises(ImproperlyConfigured, match="Unknown model 'nobody'"):
        wanted_specs(["nobody"], timeout_s=3600)


def test_the_commands_list_models_of_the_database(
    stored_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    call_command("models")
    assert f"\n{stored_model} " in capsys.readouterr().out
    catalogue.cache_clear()
    assert f"model {stored_model}" in {finding.what for finding in check_models()}


@pytest.mark.django_db
def test_entries_are_read_anew_when_they_change(settings: Settings, tmp_path: Path) -> None:
    settings.MODELS_DIR = tmp_path
    stored = StoredSpecs()
    assert stored.read() == []
    kept = StoredModel.objects.create(model_id="m", entry={"engine": "scripted"})
    StoredModel.objects.create(model_id="bad", entry={"engine": "scripted", "slot": 1})
    [first] = stored.read()
    assert stored.read()[0] is first
    kept.entry = {"engine": "scripted", "slots": 2}
    kept.save()
    assert [one.slots for one in stored.read()] == [2]
    StoredModel.objects.all().delete()
    assert stored.read() == []
