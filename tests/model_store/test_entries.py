"""Entries in the database: what is refused, which of two models of one name wins, and changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest
import yaml
from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.test import Client
from pytest_django.fixtures import Settings

from inference_site.catalogue.catalogue import Catalogue, catalogue
from inference_site.catalogue.engines.registry import ENGINES
from inference_site.catalogue.model_store.entries import (
    ALLOWED_OPTIONS,
    StoredSpecs,
    decrypt_secrets,
    encrypt_secrets,
    read_stored_entry,
    wait_for_specs,
)
from inference_site.catalogue.model_store.models import StoredModel
from inference_site.catalogue.models_file import ModelEntry, read_models_file
from inference_site.catalogue.operator_settings import InvalidSetting
from inference_site.console.admin import HIDDEN, entry_changes, entry_of, form_values, hide_secrets
from inference_site.core.domain.addresses import AllowedAddresses
from inference_site.core.domain.model_spec import ModelSpec, Price
from inference_site.ops.doctor.checks import Level, check_models

ENTRY = {
    "engine": "openai_upstream",
    "base_url": "http://a/v1",
    "api_key": "sk-secret",
    "headers": {"X-Team": "hush"},
    "price": {"input": 1.5, "output": 2.0},
    "aliases": ["one", "two"],
    "slots": 3,
}


OLD = {"engine": "ctransformers", "file": "a.bin", "model_type": "gpt2"}


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
        ({"engine": "scripted", "load_ms": 5}, ("load_ms",), "only the models file"),
        ({"engine": "command", "command": "rm -rf /"}, ("engine",), "only the models file"),
        ({"engine": ["command"]}, ("engine",), "valid string"),
        ({"file": "a.so"}, ("file",), "must end in .gguf or .ggml or .bin"),
        ({"file": "a.gguf", "mmproj": "a.bin"}, ("mmproj",), "must end in .gguf"),
        ({"file": "a.gguf", "draft_model": "../a.gguf"}, ("draft_model",), "not in the directory"),
        ({"file": "a.gguf", "lora_adapters": {"x": "a.so"}}, ("lora_adapters", "x"), "must end in"),
        ({**OLD, "lib": "org/repo/evil.so"}, ("lib",), "should be 'avx'"),
        ({**OLD, "lib": "evil"}, ("lib",), "should be 'avx'"),
        ({**OLD, "chat_template": "/proc/self/environ"}, ("chat_template",), "Could not find"),
        ({**OLD, "chat_template": "secret_key"}, ("chat_template",), "Could not find"),
        ({**OLD, "chat_template": "../x.jinja"}, ("chat_template",), "not in the directory"),
        ({**OLD, "chat_template": "/etc/x.jinja"}, ("chat_template",), "not in the directory"),
        ({**OLD, "prompt_templates": {"p": "/x.jinja"}}, ("prompt_templates", "p"), "not in the"),
        ({**ENTRY, "base_url": "http://127.0.0.1:6379/v1"}, ("base_url",), "is not public"),
        ({**ENTRY, "base_url": "http://[::1]/v1"}, ("base_url",), "is not public"),
        ({**ENTRY, "base_url": "http://169.254.169.254/v1"}, ("base_url",), "is not public"),
        ({**ENTRY, "base_url": "http://0x7f000001/v1"}, ("base_url",), "is not public"),
        ({**ENTRY, "base_url": "http://LOCALHOST/v1"}, ("base_url",), "is not public"),
        (
            {"engine": "openai_upstream", "base_urls": ["http://a/v1", "http://10.0.0.1/v1"]},
            ("base_urls",),
            "10.0.0.1 has an address that is not public",
        ),
    ],
)
def test_an_entry_that_is_wrong_is_refused(
    entry: dict[str, Any], path: tuple[str, ...], told: str
) -> None:
    with pytest.raises(InvalidSetting, match=told) as caught:
        read_stored_entry("m", entry)
    assert caught.value.path == path


def test_an_entry_means_what_it_means_in_the_models_file(tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text(yaml.safe_dump({"models": {"m": ENTRY}}))
    [spec] = read_models_file(tmp_path / "models.yaml")
    assert read_stored_entry("m", ENTRY, any_address=True) == spec
    stored = read_stored_entry("m", ENTRY)
    assert stored == replace(spec, allowed_addresses=AllowedAddresses())


def test_each_option_is_allowed_in_the_database_or_refused_there_on_purpose() -> None:
    """A new option is not allowed before somebody has thought about it."""
    refused = {"openai_upstream": {"api_key_env", "api_key_file"}}
    refused["scripted"] = {"load_ms", "load_fails"}
    refused["llama_cpp"] = {"llama_server"}
    whole_host = {"exclusive_with", "min_resident", "pinned"}
    assert ALLOWED_OPTIONS[""] == set(ModelEntry.model_fields) - whole_host
    assert ALLOWED_OPTIONS.keys() == {"", *ENGINES} - {"command"}
    for name in ALLOWED_OPTIONS.keys() - {""}:
        known = set(ENGINES[name].options.model_fields)
        assert ALLOWED_OPTIONS[name] == known - refused.get(name, set()), name


def test_the_templates_of_an_entry_are_a_family_a_text_or_a_file_of_the_directory(
    settings: Settings, tmp_path: Path
) -> None:
    settings.MODELS_DIR = tmp_path
    text = "{{ messages[0].content }}"
    for given, found in (
        ("chatml", "chatml"),
        (text, text),
        ("org/t.jinja", f"{tmp_path}/org/t.jinja"),
    ):
        spec = read_stored_entry("m", {**OLD, "chat_template": given})
        assert spec.options["chat_template"] == found


def test_a_link_that_leads_out_of_the_directory_is_no_file_of_it(
    settings: Settings, tmp_path: Path
) -> None:
    settings.MODELS_DIR = tmp_path / "models"
    settings.MODELS_DIR.mkdir()
    (tmp_path / "secret").write_text("x")
    (settings.MODELS_DIR / "t.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(InvalidSetting, match="not in the directory"):
        read_stored_entry("m", {**OLD, "chat_template": "t.jinja"})


def test_the_settings_allow_private_addresses(settings: Settings) -> None:
    entry = {**ENTRY, "base_url": "http://10.1.2.3:8000/v1"}
    settings.UPSTREAM_ALLOWED_NETWORKS = [ip_network("10.1.0.0/16")]
    assert read_stored_entry("m", entry).allowed_addresses
    settings.UPSTREAM_ALLOWED_NETWORKS = []
    settings.UPSTREAM_ALLOWED_HOSTS = ["10.1.2.3"]
    read_stored_entry("m", entry)
    settings.UPSTREAM_ALLOWED_HOSTS = [".internal"]
    with pytest.raises(InvalidSetting, match="UPSTREAM_ALLOWED_HOSTS"):
        read_stored_entry("m", entry)
    assert read_stored_entry("m", {**ENTRY, "base_url": "http://gpu.internal/v1"})


@pytest.mark.django_db
def test_entries_that_break_a_rule_are_shown_with_the_reason_and_the_others_are_served(
    admin: Client, settings: Settings, tmp_path: Path
) -> None:
    settings.MODELS_DIR = tmp_path
    private = {"engine": "openai_upstream", "base_url": "http://127.0.0.1:9/v1"}
    rows = {
        "evil": ({**OLD, "lib": "evil.so"}, False),
        "reader": ({**OLD, "chat_template": "/proc/self/environ"}, False),
        "old": (private, True),
        "new": (private, False),
        "good": ({"engine": "scripted"}, False),
    }
    for id_, (entry, any_address) in rows.items():
        StoredModel.objects.create(model_id=id_, entry=entry, any_address=any_address)
    assert [spec.id for spec in StoredSpecs().read()] == ["old", "good"]

    catalogue.cache_clear()
    found = {(f.what, f.level.value, f.found) for f in check_models() if f.level != Level.OK}
    told = {(what, level) for what, level, _ in found}
    assert {("model evil", "fail"), ("model reader", "fail"), ("model new", "fail")} < told
    [old] = [text for what, level, text in found if (what, level) == ("model old", "warn")]
    assert "127.0.0.1 has an address that is not public" in old

    listed = admin.get("/admin/model_store/storedmodel/").content.decode()
    assert "lib: Input should be" in listed
    assert "Could not find a chat template" in listed
    fleet = admin.get("/admin/fleet/").content.decode()
    assert "Models that are not served" in fleet
    assert "Could not find a chat template" in fleet
    row = StoredModel.objects.get(model_id="evil")
    form = admin.get(f"/admin/model_store/storedmodel/{row.pk}/change/").content.decode()
    assert "This model is not served: lib: Input should be" in form.replace("&#x27;", "'")

    old_row = StoredModel.objects.get(model_id="old")
    address = f"/admin/model_store/storedmodel/{old_row.pk}/change/"
    values = {"engine": "openai_upstream", "is_listed": "on", "more": "base_url: http://{}/v1"}
    refused = admin.post(address, {**values, "more": "base_url: http://127.0.0.1:9/v1"})
    assert "is not public" in refused.content.decode()
    settings.UPSTREAM_ALLOWED_HOSTS = ["127.0.0.1"]
    assert (
        admin.post(address, {**values, "more": "base_url: http://127.0.0.1:9/v1"}).status_code
        == 302
    )
    old_row.refresh_from_db()
    assert not old_row.any_address
    catalogue.cache_clear()


def test_the_form_gives_back_the_entry_and_shows_no_secret() -> None:
    values = form_values(ENTRY)
    assert "sk-secret" not in str(values)
    assert "hush" not in str(values)
    assert entry_of(values, ENTRY) == ENTRY
    moved = {**values, "base_url": values["base_url"].replace("http://a/", "http://evil/")}
    with pytest.raises(InvalidSetting, match="write it again"):
        entry_of(moved, ENTRY)


def test_the_audit_log_has_old_and_new_values_and_no_secret() -> None:
    after = {**ENTRY, "slots": 5, "api_key": "sk-other", "price": {"input": 2.0}}
    told = entry_changes(ENTRY, after)
    assert "slots: 3 → 5" in told
    assert "api_key changed" in told
    assert "sk-" not in told
    assert hide_secrets(ENTRY)["headers"] == {"X-Team": HIDDEN}


@pytest.mark.parametrize(
    "more",
    ["[1]", "a: [", "a: &x 1\nb: *x", "slots: 1", "x" * 30_000, "[" * 5_000, "!!python/name:os"],
)
def test_more_settings_that_are_no_mapping_of_yaml_are_refused(more: str) -> None:
    with pytest.raises(InvalidSetting):
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
    assert [one.id for one in gone.removed] == ["new"]
    assert known.models["both"].slots == 1
    assert known.find("new") is None


def test_only_what_the_engine_heeds_has_a_model_loaded_again() -> None:
    old = spec("m")
    priced = replace(old, price=Price(1, 1, 1), aliases=("x",), is_listed=False, projects=("p",))
    assert not priced.runs_otherwise_than(old)
    assert replace(old, slots=2).runs_otherwise_than(old)
    assert replace(old, options={"a": 1}).runs_otherwise_than(old)


def test_secrets_are_sealed_and_opened_with_the_key_of_the_site_only(settings: Settings) -> None:
    kept = encrypt_secrets(ENTRY)
    assert "sk-secret" not in str(kept)
    assert "hush" not in str(kept)
    assert decrypt_secrets(kept) == decrypt_secrets(encrypt_secrets(kept)) == ENTRY
    assert kept["base_url"] == ENTRY["base_url"]
    assert read_stored_entry("m", kept) == read_stored_entry("m", ENTRY)
    settings.SECRET_KEY = "another" * 9
    with pytest.raises(InvalidSetting, match="write it again") as caught:
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
    assert [spec.id for spec in wait_for_specs(["demo", "k"])] == ["demo", stored_model]
    assert caplog.text == "", "`serve` prints it among its own lines"


@pytest.mark.django_db
def test_a_name_that_the_database_does_not_have_either_is_refused_at_once() -> None:
    catalogue.cache_clear()
    with pytest.raises(ImproperlyConfigured, match="Unknown model 'nobody'"):
        wait_for_specs(["nobody"], timeout_s=3600)


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


@pytest.mark.django_db
def test_the_migration_keeps_the_addresses_of_the_servers_that_there_are() -> None:
    for id_, engine in (("remote", "openai_upstream"), ("local", "llama_cpp")):
        StoredModel.objects.create(model_id=id_, entry={"engine": engine})
    migration = import_module("inference_site.catalogue.model_store.migrations.0002_any_address")
    migration.keep_addresses(apps, None)
    kept = StoredModel.objects.values_list("model_id", "any_address")
    assert dict(kept) == {"remote": True, "local": False}
