"""The model catalogue: what a file may say, and how a bad one is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from pytest_django.fixtures import Settings

from worker.catalog import Catalog, catalog, default_threads, parse_catalog
from worker.engines.base import ModelSpec
from worker.generation import Sampling


@pytest.fixture
def models_file(tmp_path: Path) -> Path:
    return tmp_path / "models.yaml"


@pytest.fixture
def fresh_catalog() -> Iterator[None]:
    catalog.cache_clear()
    yield
    catalog.cache_clear()


def test_a_file_says_everything_about_a_model(models_file: Path) -> None:
    models_file.write_text(
        """
        models:
          tiny:
            file: weights/tiny.gguf
            slots: 3
            context_length: 1024
            threads: 5
            chat_template_kwargs: {enable_thinking: false}
          play:
            engine: scripted
            script: [{text: hi}]
        """
    )
    assert list(parse_catalog(models_file).models.values()) == [
        ModelSpec(
            id="tiny",
            engine="llama_cpp",
            file=models_file.parent / "weights/tiny.gguf",
            slots=3,
            context_length=1024,
            threads=5,
            options={"chat_template_kwargs": {"enable_thinking": False}},
        ),
        ModelSpec(
            id="play",
            engine="scripted",
            threads=default_threads(),
            options={"script": [{"text": "hi"}]},
        ),
    ]


def test_adapters_are_files_beside_the_models_file(models_file: Path) -> None:
    models_file.write_text("models: {m: {lora_adapters: {one: sub/one.gguf, two: /two.gguf}}}")
    assert parse_catalog(models_file).models["m"].lora_adapters == {
        "one": models_file.parent / "sub/one.gguf",
        "two": Path("/two.gguf"),
    }


def test_sampling_of_a_model_goes_before_that_of_the_site(
    models_file: Path, settings: Settings
) -> None:
    settings.SAMPLING = {"temperature": 0.5, "top_p": 0.9, "logit_bias": [[5, -1.5]]}
    models_file.write_text("models: {m: {sampling: {temperature: 0, top_k: 5}}, n: {}}")
    models = parse_catalog(models_file).models
    assert models["m"].sampling == Sampling(
        temperature=0, top_p=0.9, top_k=5, logit_bias=((5, -1.5),)
    )
    assert models["n"].sampling == Sampling(temperature=0.5, top_p=0.9, logit_bias=((5, -1.5),))


@pytest.mark.parametrize(
    ("sampling", "told"),
    [
        ([], "SAMPLING must be a mapping"),
        ({"temprature": 1}, "SAMPLING: unknown key 'temprature'"),
        ({"temperature": "hot"}, "SAMPLING.temperature: "),
    ],
)
@pytest.mark.usefixtures("fresh_catalog")
def test_bad_sampling_of_the_site_is_told(settings: Settings, sampling: Any, told: str) -> None:
    settings.MODELS_FILE, settings.SAMPLING = None, sampling
    with pytest.raises(ImproperlyConfigured, match=told):
        catalog()


def test_an_absolute_path_stays_as_it_is(models_file: Path) -> None:
    models_file.write_text("models: {m: {file: /models/m.gguf}}")
    assert parse_catalog(models_file).models["m"].file == Path("/models/m.gguf")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "'models' must map model ids"),
        ("[]", "'models' must map model ids"),
        ("models: []", "'models' must map model ids"),
        ("models: {}", "'models' must map model ids"),
        ("model: {m: {}}", "'models' must map model ids"),
        ("models: {m: [", "cannot be read"),
        ("models: {m: demo.gguf}", "models.m must be a mapping"),
        ("models: {m: }", "models.m must be a mapping"),
        ("models: {m: {engine: vllm}}", "models.m.engine: unknown engine 'vllm'; there are llama"),
        ("models: {m: {engine: [scripted]}}", "models.m.engine: unknown engine"),
        ("models: {m: {slots: 0}}", "models.m.slots: expected a whole number from 1, got 0"),
        ("models: {m: {slots: -1}}", "models.m.slots: expected a whole number from 1, got -1"),
        ("models: {m: {slots: true}}", "models.m.slots: expected a whole number from 1, got True"),
        ("models: {m: {slots: '4'}}", "models.m.slots: expected a whole number from 1, got '4'"),
        ("models: {m: {threads: 1.5}}", "models.m.threads: expected a whole number from 1"),
        ("models: {m: {context_length: }}", "models.m.context_length: expected a whole number"),
        ("models: {ok: {}, m: {slot: 4}}", "models.m: unknown key 'slot'"),
        ("models: {m: {sampling: 5}}", "models.m.sampling must be a mapping"),
        ("models: {m: {sampling: {heat: 1}}}", "models.m.sampling: unknown key 'heat'"),
        ("models: {m: {sampling: {top_k: 1.5}}}", "models.m.sampling.top_k: "),
        ("models: {m: {sampling: {seed: [1]}}}", "models.m.sampling.seed: "),
        ("models: {m: {lora_adapters: [a.gguf]}}", "models.m.lora_adapters must map names to"),
        ("models: {m: {script: []}}", "models.m: unknown key 'script'"),  # Another engine's.
    ],
)
def test_an_error_names_the_file_and_the_key(models_file: Path, content: str, told: str) -> None:
    models_file.write_text(content)
    with pytest.raises(ImproperlyConfigured) as caught:
        parse_catalog(models_file)
    assert str(caught.value).startswith(f"{models_file}: ")
    assert told in str(caught.value)


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00models"])
def test_a_file_that_cannot_be_read_is_named(models_file: Path, content: bytes | None) -> None:
    if content is not None:
        models_file.write_bytes(content)
    with pytest.raises(ImproperlyConfigured, match="cannot be read") as caught:
        parse_catalog(models_file)
    assert str(models_file) in str(caught.value)


@pytest.mark.parametrize("name", ["org/Tiny-1B", "ORG/tiny-1b", "  org/tiny-1b\n"])
def test_a_model_is_found_whatever_the_case_and_the_spaces_around(name: str) -> None:
    spec = ModelSpec("org/Tiny-1B", "scripted")
    assert Catalog({"other": ModelSpec("other", "scripted"), spec.id: spec}).find(name) is spec


@pytest.mark.parametrize("name", ["", "tiny", "org/Tiny-1B-chat", "org/Tiny 1B"])
def test_what_is_not_there_is_not_found(name: str) -> None:
    assert Catalog({"org/Tiny-1B": ModelSpec("org/Tiny-1B", "scripted")}).find(name) is None


@pytest.mark.usefixtures("fresh_catalog")
def test_the_demo_model_is_the_catalogue_when_no_file_is_given(settings: Settings) -> None:
    settings.MODELS_FILE = None
    demo, embedding = catalog().models.values()
    assert (embedding.id, embedding.file) == ("demo-embedding", demo.file)
    assert (demo.id, demo.engine) == ("demo", "llama_cpp")
    assert demo.file is not None
    assert demo.file.is_file()


@pytest.mark.usefixtures("fresh_catalog")
def test_the_file_of_the_settings_is_the_catalogue(settings: Settings, models_file: Path) -> None:
    models_file.write_text("models: {play: {engine: scripted}}")
    settings.MODELS_FILE = models_file
    assert list(catalog().models) == ["play"]
