"""The model catalogue: what a file may say, and how a bad one is told."""

from __future__ import annotations

import json
import struct
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from django.core.exceptions import ImproperlyConfigured
from pytest_django.fixtures import Settings

from inference_site.catalogue.catalogue import DEMO_FILE, Catalogue, catalogue, discover
from inference_site.catalogue.models_file import (
    ModelEntry,
    default_threads,
    entry_lines,
    read_models_file,
)
from inference_site.core.domain.model_spec import ModelSpec, Price
from inference_site.core.domain.request import Sampling
from inference_site.management.commands import serve
from tests.tiny_ggml import CONTEXT, write_ggml

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def models_file(tmp_path: Path) -> Path:
    return tmp_path / "models.yaml"


@pytest.fixture
def fresh_catalog() -> Iterator[None]:
    catalogue.cache_clear()
    yield
    catalogue.cache_clear()


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
    assert list(read_models_file(models_file)) == [
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
            threads=default_threads("scripted"),
            options={"script": [{"text": "hi"}]},
        ),
    ]


def test_adapters_are_files_beside_the_models_file(models_file: Path) -> None:
    models_file.write_text("models: {m: {lora_adapters: {one: sub/one.gguf, two: /two.gguf}}}")
    assert read_models_file(models_file)[0].lora_adapters == {
        "one": models_file.parent / "sub/one.gguf",
        "two": Path("/two.gguf"),
    }


def test_sampling_of_a_model_goes_before_that_of_the_site(
    models_file: Path, settings: Settings
) -> None:
    settings.SAMPLING = {"temperature": 0.5, "top_p": 0.9, "logit_bias": {"5": -1.5}}
    models_file.write_text("models: {m: {sampling: {temperature: 0, top_k: 5}}, n: {}}")
    one, other = read_models_file(models_file)
    assert one.sampling == Sampling(temperature=0, top_p=0.9, top_k=5, logit_bias=((5, -1.5),))
    assert other.sampling == Sampling(temperature=0.5, top_p=0.9, logit_bias=((5, -1.5),))


@pytest.mark.parametrize(
    ("sampling", "told"),
    [
        ([], "SAMPLING: must be a mapping"),
        ({"temprature": 1}, "SAMPLING.temprature: unknown key"),
        (
            {"temperature": "hot"},
            "SAMPLING.temperature: Input should be a valid number, got 'hot'.",
        ),
        ({"temperature": 2.5}, "SAMPLING.temperature: Input should be less than or equal to 2"),
        ({"logit_bias": {"5": 500}}, "SAMPLING.logit_bias.5: Input should be less than or equal"),
    ],
)
@pytest.mark.usefixtures("fresh_catalog")
def test_bad_sampling_of_the_site_is_told(settings: Settings, sampling: Any, told: str) -> None:
    settings.MODELS_FILE, settings.SAMPLING = None, sampling
    with pytest.raises(ImproperlyConfigured, match=told):
        catalogue()


def test_an_absolute_path_stays_as_it_is(models_file: Path) -> None:
    models_file.write_text("models: {m: {file: /models/m.gguf}}")
    assert read_models_file(models_file)[0].file == Path("/models/m.gguf")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "models: must map model ids"),
        ("models: {}", "models: must map model ids"),
        ("model: {m: {}}", "models: must map model ids"),
        ("models: {m: [", "is not YAML"),
        ("models: {m: [demo.gguf]}", "models.m: must be a mapping, or the name of a file"),
        ("models: {m: }", "models.m: must be a mapping"),
        (f"models: {{{'m' * 201}: {{}}}}", f"models.{'m' * 201}: an id has 1 to 200 printable"),
        ('models: {"a\\tb": {}}', "an id has 1 to 200 printable characters"),
        ("models: {m: {engine: vllm}}", "models.m.engine: unknown engine 'vllm'; there are"),
        ("models: {m: {engine: [scripted]}}", "models.m.engine: Input should be a valid string"),
        ("models: {m: {slots: 0}}", "models.m.slots: Input should be greater than 0, got 0"),
        ("models: {m: {slots: true}}", "models.m.slots: Input should be a valid integer, got True"),
        ("models: {m: {slots: '4'}}", "models.m.slots: Input should be a valid integer, got '4'"),
        ("models: {m: {threads: 1.5}}", "models.m.threads: Input should be a valid integer"),
        ("models: {m: {context_length: }}", "models.m.context_length: it is empty"),
        (
            "models: {m: {gpu_layers: -2}}",
            "models.m.gpu_layers: Input should be greater than or equal to -1",
        ),
        ("models: {m: {aliases: tiny}}", "models.m.aliases: must be a list"),
        ("models: {m: {listed: perhaps}}", "models.m.listed: Input should be a valid boolean"),
        ("models: {m: {price: {inptu: 1}}}", "models.m.price.inptu: unknown key"),
        ("models: {m: {price: {input: -1}}}", "models.m.price.input: Input should be greater"),
        ("models: {m: {price: {output: 1.0e+15}}}", "models.m.price.output: Input should be less"),
        ("models: {m: {price: {cached: .inf}}}", "models.m.price.cached: Input should be a finite"),
        ("models: {m: {}}\nmore: 1", "more: unknown key"),
        ("models: {m: {slots: 1, slots: 2}}", "models.m.slots: it is there twice"),
        ("models: {ok: {}, m: {slot: 4}}", "models.m.slot: unknown key"),
        ("models: {m: {sampling: 5}}", "models.m.sampling: must be a mapping"),
        ("models: {m: {sampling: {heat: 1}}}", "models.m.sampling.heat: unknown key"),
        ("models: {m: {sampling: {top_k: 1.5}}}", "models.m.sampling.top_k: "),
        ("models: {m: {sampling: {seed: [1]}}}", "models.m.sampling.seed: "),
        ("models: {m: {sampling: {top_p: 1.1}}}", "models.m.sampling.top_p: Input should be less"),
        ("models: {m: {sampling: {mirostat: 3}}}", "models.m.sampling.mirostat: Input should be"),
        ("models: {m: {sampling: {temperature: .nan}}}", "models.m.sampling.temperature: "),
        ("models: {m: {sampling: {logit_bias: {-1: 5}}}}", "models.m.sampling.logit_bias.-1"),
        ("models: {m: {projects: web}}", "models.m.projects: must be a list"),
        ("models: {m: {projects: []}}", "models.m.projects: it is empty; leave it out for all"),
        (
            "models: {m: {lib: basic}}",
            "models.m.lib: llama_cpp takes no such option; ctransformers would.",
        ),
        (
            "models: {m: {engine: openai_upstream, mmproj: a.gguf}}",
            "models.m.mmproj: openai_upstream takes no such option; llama_cpp would.",
        ),
        ("models: {m: {lora_adapters: [a.gguf]}}", "models.m.lora_adapters: must be a mapping"),
        (
            "models: {m: {engine: openai_upstream}}",
            "models.m.base_urls: it is missing, as is 'base_url': the address of a server",
        ),
        ("models: {m: {embedding: max}}", "models.m.embedding: Input should be 'mean', 'cls', "),
        ("models: {m: {cache_type_k: q9}}", "models.m.cache_type_k: Input should be 'f32', 'f16'"),
        (
            "models: {m: {cache_type_v: q8_0, flash_attn: off}}",
            "models.m.flash_attn: cannot be off with 'cache_type_v' q8_0",
        ),
        ("models: {m: {n_ubatch: 2049}}", "models.m.n_ubatch: cannot be more than 'n_batch', 2048"),
        ("models: {m: {tensor_split: [0, 0]}}", "models.m.tensor_split: needs a share above 0"),
        ("models: {m: {rope_freq_base: -1}}", "models.m.rope_freq_base: Input should be greater"),
        ("models: {m: {numa: yes}}", "models.m.numa: Input should be 'distribute', 'isolate'"),
        ("models: {m: {draft_max: 4}}", "models.m.draft_max: needs a smaller model, 'draft_model'"),
        (
            "models: {m: {n_batch: 64, embedding: mean}}",
            "models.m.embedding: cannot be used together with 'n_batch'",
        ),
        (
            "models: {m: {engine: ctransformers, model_type: bert}}",
            "models.m.model_type: unknown architecture; there are dolly-v2, falcon",
        ),
        ("models: {m: {script: []}}", "models.m.script: llama_cpp takes no such option; scripted"),
        (
            "models: {m: {engine: scripted, lora_adapters: {x: a.gguf}}}",
            "models.m.lora_adapters: scripted applies no adapters; llama_cpp would.",
        ),
        ("models:\n  m: 2026-02-30", ":2: is not YAML: day is out of range for month."),
        ("models:\n  ok: {}\n  007: {slot: 4}", ":3: models.007.slot: unknown key."),
        ('models: {m: {file: "a\\0.gguf"}}', ":1: models.m.file: a path has no NUL."),
        ("models: &a {m: *a}", ": an alias is in the mapping that it stands for."),
    ],
)
def test_an_error_names_the_file_and_the_key(models_file: Path, content: str, told: str) -> None:
    models_file.write_text(content)
    with pytest.raises(ImproperlyConfigured) as caught:
        read_models_file(models_file)
    assert str(caught.value).startswith(f"{models_file}:")
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "option", ["api_key: [sk-secret]", "headers: {X-Key: [sk-secret]}", "api_key_env: [sk-secret]"]
)
def test_an_error_does_not_repeat_what_may_be_a_key(models_file: Path, option: str) -> None:
    upstream = "engine: openai_upstream, base_url: http://h/v1"
    models_file.write_text(f"models: {{m: {{{upstream}, {option}}}}}")
    with pytest.raises(ImproperlyConfigured) as caught:
        read_models_file(models_file)
    assert f"{models_file}:1: models.m.{option.partition(':')[0]}" in str(caught.value)
    assert "sk-secret" not in "".join(traceback.format_exception(caught.value))


def test_a_key_is_not_shown_when_a_model_is_printed(models_file: Path) -> None:
    upstream = "engine: openai_upstream, base_url: http://h/v1"
    models_file.write_text(
        f"models: {{m: {{{upstream}, api_key: sk-secret, headers: {{X-Key: sk-secret}}}}}}"
    )
    [spec] = read_models_file(models_file)
    assert "sk-secret" not in repr(spec)
    assert spec.options["api_key"].get_secret_value() == "sk-secret"


def test_an_id_is_what_is_written(models_file: Path) -> None:
    models_file.write_text("7: a.gguf\n007: b.gguf\nyes: c.gguf\n1.0: d.gguf\n2026-02-30: e.gguf")
    ids = ["7", "007", "yes", "1.0", "2026-02-30"]
    assert [spec.id for spec in read_models_file(models_file)] == ids
    assert list(entry_lines(models_file).values()) == [1, 2, 3, 4, 5]


@pytest.mark.usefixtures("fresh_catalog")
def test_an_error_of_a_file_or_folder_names_its_setting(settings: Settings, tmp_path: Path) -> None:
    settings.MODELS_FILE, settings.MODELS_DIR = tmp_path / "none", tmp_path
    with pytest.raises(ImproperlyConfigured, match=r"^MODELS_FILE: .*none: cannot be read"):
        catalogue()
    settings.MODELS_FILE, settings.MODELS_DIR = None, tmp_path / "file"
    settings.MODELS_DIR.touch()
    with pytest.raises(ImproperlyConfigured, match=r"^MODELS_DIR: .*file is not a folder"):
        catalogue()


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00models"])
def test_a_file_that_cannot_be_read_is_named(models_file: Path, content: bytes | None) -> None:
    if content is not None:
        models_file.write_bytes(content)
    with pytest.raises(ImproperlyConfigured, match="cannot be read") as caught:
        read_models_file(models_file)
    assert str(models_file) in str(caught.value)


@pytest.mark.parametrize("name", ["org/Tiny-1B", "ORG/tiny-1b", "  org/tiny-1b\n"])
def test_a_model_is_found_whatever_the_case_and_the_spaces_around(name: str) -> None:
    spec = ModelSpec("org/Tiny-1B", "scripted")
    assert Catalogue([ModelSpec("other", "scripted"), spec]).find(name) is spec


@pytest.mark.parametrize("name", ["", "tiny", "org/Tiny-1B-chat", "org/Tiny 1B"])
def test_what_is_not_there_is_not_found(name: str) -> None:
    assert Catalogue([ModelSpec("org/Tiny-1B", "scripted")]).find(name) is None


def test_an_error_names_the_line(models_file: Path) -> None:
    models_file.write_text("# Models\nmodels:\n  one: {}\n  two:\n    threads: 2\n    slots: x\n")
    with pytest.raises(
        ImproperlyConfigured,
        match=r"models.yaml:6: models.two.slots: Input should be a valid integer",
    ):
        read_models_file(models_file)


def test_an_error_of_sampling_names_the_line_of_the_value(models_file: Path) -> None:
    models_file.write_text("models:\n  one:\n    sampling:\n      top_k: 4\n      min_p: -1\n")
    with pytest.raises(ImproperlyConfigured, match=r"yaml:5: models.one.sampling.min_p: Input"):
        read_models_file(models_file)


def test_a_model_for_some_projects_is_not_there_for_others(models_file: Path) -> None:
    models_file.write_text(
        "models: {all: {}, own: {projects: [web], aliases: [mine]}, hid: {listed: false}}"
    )
    catalogue = Catalogue(read_models_file(models_file))
    assert [spec.id for spec in catalogue.listed("web")] == ["all", "own"]
    assert [spec.id for spec in catalogue.listed("other")] == ["all"]
    for name in ("own", "MINE", "own:latest"):
        assert catalogue.find(name, "web") is catalogue.find(name) is catalogue.models["own"]
        assert catalogue.find(name, "other") is None
    assert catalogue.find("hid", "other") is catalogue.models["hid"]


def test_names_prices_and_files_of_the_hub_are_read(models_file: Path, settings: Settings) -> None:
    settings.MODELS_DIR = Path("/var/models")
    models_file.write_text(
        """
        models:
          m:
            file: hf:org/repo/m.gguf
            aliases: [small, Quick]
            listed: false
            gpu_layers: 12
            price: {input: 0.5, output: 2}
        """
    )
    (spec,) = read_models_file(models_file)
    assert spec.file == Path("/var/models/org/repo/m.gguf")
    assert (spec.aliases, spec.is_listed, spec.gpu_layers) == (("small", "Quick"), False, 12)
    assert spec.price == Price(input=0.5, cached=0.5, output=2)


@pytest.mark.parametrize(
    ("architecture", "given", "context"),
    [
        *((name, {}, CONTEXT) for name in ("gpt2", "gptj", "gpt_neox", "dolly-v2")),
        *((name, {}, CONTEXT) for name in ("starcoder", "mpt", "replit")),
        ("gpt2", {"context_length": 32}, 32),
        ("gpt2", {"context_length": 4096}, CONTEXT),
        ("falcon", {}, 2048),
    ],
)
def test_the_context_is_what_a_ggml_file_has_at_most(
    tmp_path: Path, models_file: Path, architecture: str, given: dict[str, int], context: int
) -> None:
    write_ggml(tmp_path / "m.bin", architecture)
    entry = {"engine": "ctransformers", "file": str(tmp_path / "m.bin"), **given}
    models_file.write_text(json.dumps({"models": {"m": entry | {"model_type": architecture}}}))
    assert read_models_file(models_file)[0].context_length == context


@pytest.mark.parametrize("content", ["models: {a: x/a.gguf, b: b.gguf}", "a: x/a.gguf\nb: b.gguf"])
def test_a_model_may_be_a_name_and_a_file_alone(models_file: Path, content: str) -> None:
    models_file.write_text(content)
    folder = models_file.parent
    models = read_models_file(models_file)
    assert {spec.id: spec.file for spec in models} == {
        "a": folder / "x/a.gguf",
        "b": folder / "b.gguf",
    }
    assert entry_lines(models_file).keys() == {"a", "b"}


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("small", "one"),
        (" SMALL ", "one"),
        ("one:latest", "one"),
        ("small:q8", "one"),
        ("two:8b", "two:8b"),
        ("two:4b", None),
        ("default", "two:8b"),
        ("Default", "two:8b"),
    ],
)
def test_a_name_is_an_id_an_alias_what_is_before_its_colon_or_the_default(
    settings: Settings, name: str, found: str | None
) -> None:
    settings.DEFAULT_MODEL = "two:8b"
    one = ModelSpec("one", "scripted", aliases=("small",))
    spec = Catalogue([one, ModelSpec("two:8b", "scripted")]).find(name)
    assert (spec and spec.id) == found


def test_a_model_may_be_asked_for_by_its_architecture_when_one_is_meant(tmp_path: Path) -> None:
    demo = ModelSpec("demo", "llama_cpp", DEMO_FILE)
    coder = ModelSpec("coder", "ctransformers", options={"model_type": "starcoder"})
    gone = ModelSpec("gone", "llama_cpp", tmp_path / "gone.gguf")
    two = Catalogue([demo, coder, gone])
    assert two.find("Llama") == two.find("llama:latest") == demo
    assert two.find("starcoder") == coder
    assert two.find("gone.gguf") is None
    others = replace(demo, id="others", projects=("research",))
    three = Catalogue([demo, others])
    assert three.find("llama") is None
    assert three.find("llama", "web") == demo
    assert Catalogue([demo, replace(coder, id="llama")]).find("llama", "web") != demo


@pytest.mark.parametrize("aliases", [("ONE",), ("two", "one")])
def test_two_models_of_one_name_are_refused(aliases: tuple[str, ...]) -> None:
    specs = [ModelSpec("one", "scripted"), ModelSpec("other", "scripted", aliases=aliases)]
    with pytest.raises(ImproperlyConfigured, match="The models 'one' and 'other' have one name"):
        Catalogue(specs)


@pytest.mark.usefixtures("fresh_catalog")
def test_files_in_the_models_folder_are_models(settings: Settings, tmp_path: Path) -> None:
    settings.MODELS_FILE, settings.MODELS_DIR = None, tmp_path
    folder = tmp_path / "org" / "repo"
    folder.mkdir(parents=True)
    (folder / "Tiny-Q8.gguf").symlink_to(DEMO_FILE)
    (folder / "big-00002-of-00003.gguf").symlink_to(DEMO_FILE)
    (folder / "broken.gguf").write_bytes(b"GGUF")
    spec = catalogue().models["tiny-q8"]
    assert (spec.file, spec.context_length) == (folder / "Tiny-Q8.gguf", 2048)
    assert list(catalogue().models) == ["demo", "demo-embedding", "demo-memory", "tiny-q8"]


def test_an_entry_changes_only_what_it_names(models_file: Path, tmp_path: Path) -> None:
    (tmp_path / "long.gguf").write_bytes(with_context(DEMO_FILE.read_bytes(), 100_000))
    models_file.write_text(
        "models: {bare: {file: long.gguf}, wide: {file: long.gguf, slots: 9}, "
        "deep: {file: long.gguf, context_length: 50000}, gone: {file: gone.gguf}}"
    )
    [found] = discover(tmp_path)
    sizes = {spec.id: (spec.slots, spec.context_length) for spec in read_models_file(models_file)}
    assert sizes["bare"] == sizes["gone"] == (found.slots, found.context_length) == (4, 8192)
    assert (sizes["wide"], sizes["deep"]) == ((9, 8192), (4, 50_000))


def with_context(model: bytes, context_length: int) -> bytes:
    key = b"llama.context_length"
    at = model.index(key) + len(key) + 4
    return model[:at] + struct.pack("<I", context_length) + model[at + 4 :]


@pytest.mark.usefixtures("fresh_catalog")
def test_a_file_that_appears_is_a_model_once_it_is_whole(
    settings: Settings, tmp_path: Path
) -> None:
    settings.MODELS_FILE, settings.MODELS_DIR = None, tmp_path / "models"
    known, whole = catalogue(), DEMO_FILE.read_bytes()
    assert not known.update()
    settings.MODELS_DIR.mkdir()
    new = settings.MODELS_DIR / "new.gguf"
    for content in (whole[:1000], whole[:3_000_000], whole[:3_000_000], whole[:-1], whole):
        new.write_bytes(content)
        assert not known.update()  # It has just changed, or is not whole.
    assert [spec.id for spec in known.update().new] == ["new"]
    assert not known.update()
    assert known.find("NEW") is known.models["new"]
    assert known.optional == {"new"}
    (settings.MODELS_DIR / "demo.gguf").write_bytes(whole)
    assert not any([known.update(), known.update()])  # There is one of this name.


@pytest.mark.usefixtures("fresh_catalog")
def test_a_file_that_is_being_copied_at_the_start_is_loaded_once_it_is_whole(
    settings: Settings, tmp_path: Path
) -> None:
    settings.MODELS_FILE, settings.MODELS_DIR = None, tmp_path
    (tmp_path / "half.gguf").write_bytes(DEMO_FILE.read_bytes()[:3_000_000])
    known = catalogue()
    (tmp_path / "half.gguf").write_bytes(DEMO_FILE.read_bytes())
    assert not known.update()  # It has just changed.
    assert [spec.id for spec in known.update().new] == ["half"]
    assert not known.update()


@pytest.mark.usefixtures("fresh_catalog")
def test_a_split_model_appears_when_all_of_its_parts_are_there(
    settings: Settings, tmp_path: Path
) -> None:
    settings.MODELS_FILE, settings.MODELS_DIR = None, tmp_path
    known = catalogue()
    for number in (1, 2):
        assert not any([known.update(), known.update()])
        (tmp_path / f"big-0000{number}-of-00002.gguf").symlink_to(DEMO_FILE)
    assert not known.update()
    assert [spec.id for spec in known.update().new] == ["big-00001-of-00002"]


@pytest.mark.usefixtures("fresh_catalog")
def test_the_demo_model_is_the_catalogue_when_no_file_is_given(settings: Settings) -> None:
    settings.MODELS_FILE = None
    demo, embedding, memory = catalogue().models.values()
    assert (memory.id, memory.engine) == ("demo-memory", "scripted")
    assert (embedding.id, embedding.file) == ("demo-embedding", demo.file)
    assert (demo.id, demo.engine) == ("demo", "llama_cpp")
    assert demo.file is not None
    assert demo.file.is_file()


@pytest.mark.usefixtures("fresh_catalog")
def test_the_file_of_the_settings_is_the_catalogue(settings: Settings, models_file: Path) -> None:
    models_file.write_text("models: {play: {engine: scripted}}")
    settings.MODELS_FILE = models_file
    assert list(catalogue().models) == ["play", "demo", "demo-embedding", "demo-memory"]
    settings.DEMO_MODEL = False
    catalogue.cache_clear()
    assert list(catalogue().models) == ["play"]


@pytest.mark.usefixtures("fresh_catalog")
def test_an_entry_goes_before_its_own_file_and_nothing_else(
    settings: Settings, tmp_path: Path
) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    for name in ("own", "other", "draft", "taken"):
        (folder / f"{name}.gguf").symlink_to(DEMO_FILE)
    (tmp_path / "link").symlink_to(folder)
    settings.MODELS_DIR, settings.MODELS_FILE = folder, tmp_path / "models.yaml"
    settings.MODELS_FILE.write_text(
        "models: {mine: {file: link/own.gguf, draft_model: models/draft.gguf, slots: 2}, "
        "demo: {engine: scripted, aliases: [taken]}, late: {file: models/late.gguf}}"
    )
    known = catalogue()
    own = ["mine", "demo", "late"]
    assert list(known.models) == [*own, "demo-embedding", "demo-memory", "other"]
    assert (known.models["mine"].slots, known.models["demo"].engine) == (2, "scripted")
    # The site is ready without them.
    assert known.optional == {"demo-embedding", "demo-memory", "other"}
    for name in ("late", "dropped"):
        (folder / f"{name}.gguf").symlink_to(DEMO_FILE)
    assert not known.update()
    assert {spec.id for spec in known.update().new} == {
        "late",
        "dropped",
    }  # Both can be loaded now.
    assert "dropped" in known.optional


def test_the_example_in_the_docs_is_a_good_file_with_every_key_that_engines_share() -> None:
    example = ROOT / "docs" / "models.example.yaml"
    specs = Catalogue(read_models_file(example))
    assert {"llama-3.2-3b", "qwen-vl", "nomic-embed", "scripted"} <= specs.models.keys()
    entries = yaml.safe_load(example.read_text())["models"].values()
    assert ModelEntry.model_fields.keys() <= {key for entry in entries for key in entry}


def test_serve_shows_a_model_that_was_asked_for_or_the_first_that_chats() -> None:
    assert serve._good_models(None)[0].id == "demo"
    assert serve._good_models(DEMO_FILE)[0].file == DEMO_FILE
