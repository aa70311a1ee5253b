"""LoRA adapters in llama.cpp: what is read with one never serves a request without it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pytest_django.fixtures import Settings

from inference_site.catalogue.catalogue import DEMO_FILE
from inference_site.catalogue.engines.registry import model_capabilities
from inference_site.catalogue.model_store.adapters import adapter_file
from inference_site.core.domain.errors import EngineLoadError
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.request import GenerationRequest, Message, Sampling
from tests.sinks import RecordingSink
from tests.tiny_weights import (
    write_adapter,
    write_misfit,
    write_stranger,
    write_uneven,
    write_zeros,
)
from worker.engines.base import Engine, load_engine

SPEC = ModelSpec(
    "demo",
    "llama_cpp",
    DEMO_FILE,
    slots=1,
    options={"chat_template_kwargs": {"enable_thinking": False}},
)
PIRATE, JAPAN = "Tell me a story about a pirate. " * 8, "What is the capital of Japan? " * 8
ONE = (("one", 1.0),)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    adapter = write_adapter(tmp_path_factory.mktemp("adapters") / "one.gguf")
    loaded = load_engine(replace(SPEC, lora_adapters={"one": adapter}))
    yield loaded
    loaded.close()


def told(engine: Engine, text: str, lora: tuple[tuple[str, float], ...] = ()) -> str:
    sink = RecordingSink()
    sampling = Sampling(temperature=0)
    engine.run(
        GenerationRequest(
            "demo", (Message("user", text),), sampling, max_output_tokens=20, lora=lora
        ),
        sink,
    )
    return sink.text


def test_request_without_adapters_goes_on_from_no_prompt_that_had_them(engine: Engine) -> None:
    plain, adapted = told(engine, PIRATE), told(engine, PIRATE, ONE)
    assert adapted != plain
    for _ in range(3):
        assert told(engine, PIRATE) == plain
        assert told(engine, PIRATE, ONE) == adapted
        assert told(engine, PIRATE, (("one", 0.0),)) == plain


def test_prompt_that_lost_its_slot_is_not_brought_back_for_other_adapters(engine: Engine) -> None:
    plain = told(engine, PIRATE)
    for _ in range(3):
        told(engine, PIRATE, ONE)
        told(engine, JAPAN)  # Takes the slot; the prompt before would be kept on the side.
        assert told(engine, PIRATE) == plain
        told(engine, JAPAN, ONE)


def test_only_a_model_with_adapters_takes_any() -> None:
    assert "lora" not in model_capabilities(SPEC)
    assert "lora" in model_capabilities(replace(SPEC, lora_adapters={"one": Path("one.gguf")}))


def test_adapter_that_is_missing_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ghost.gguf"
    with pytest.raises(EngineLoadError, match="Model 'demo': cannot read") as caught:
        load_engine(replace(SPEC, lora_adapters={"ghost": path}))
    assert str(path) in str(caught.value)


def test_file_that_is_no_adapter_is_told(tmp_path: Path) -> None:
    with pytest.raises(EngineLoadError, match=r"Model 'demo': llama\.cpp could not load"):
        load_engine(replace(SPEC, lora_adapters={"model": DEMO_FILE}))
    zip_file = tmp_path / "adapter.gguf"
    zip_file.write_bytes(b"PK\x03\x04")
    with pytest.raises(EngineLoadError, match="is not a GGUF file"):
        load_engine(replace(SPEC, lora_adapters={"zip": zip_file}))


def test_adapter_for_a_model_of_other_sizes_is_refused_before_a_reload(
    tmp_path: Path, settings: Settings
) -> None:
    settings.MODELS_DIR = tmp_path
    fits = write_adapter(tmp_path / "fits.gguf")
    smaller = write_stranger(tmp_path / "smaller.gguf")
    deeper = write_stranger(tmp_path / "deeper.gguf", "blk.99.attn_q.weight")
    assert adapter_file(fits.name, SPEC) == fits.name
    for stranger in (smaller, deeper):
        with pytest.raises(ValueError, match=r"for another model: its tensor blk\.\d+\.attn_q"):
            adapter_file(stranger.name, SPEC)
    # The files of the model may be on another host.
    assert adapter_file(deeper.name, replace(SPEC, file=tmp_path / "none.gguf")) == deeper.name


def test_adapter_whose_halves_have_other_ranks_is_refused_before_a_model_is_loaded_with_it(
    tmp_path: Path, settings: Settings
) -> None:
    """A worker drops the newest adapter of a model that does not load, which may be another one."""
    settings.MODELS_DIR = tmp_path
    with pytest.raises(ValueError, match=r"its tensor blk\.0\.attn_q\.weight\.lora_b does"):
        adapter_file(write_uneven(tmp_path / "uneven.gguf").name, SPEC)


def test_adapter_that_llama_cpp_takes_is_not_refused(tmp_path: Path, settings: Settings) -> None:
    """A side of 1 may be missing; halves of embeddings are swapped; experts have three sides."""
    settings.MODELS_DIR = tmp_path
    gate, experts = "blk.0.ffn_gate_inp_shexp.weight", "blk.0.ffn_up_exps.weight"
    embeddings = "per_layer_token_embd.weight"
    shapes = {gate: (64,), experts: (4, 96, 64), embeddings: (100, 32)}
    spec = replace(SPEC, file=write_zeros(tmp_path / "model.gguf", shapes, is_adapter=False))

    def check(**halves: tuple[int, ...]) -> None:
        write_zeros(tmp_path / "lora.gguf", halves, is_adapter=True)
        adapter_file("lora.gguf", spec)

    check(**{f"{gate}.lora_a": (2, 64), f"{gate}.lora_b": (1, 2)})
    check(**{f"{experts}.lora_a": (4, 2, 64), f"{experts}.lora_b": (4, 96, 2)})
    check(**{f"{embeddings}.lora_a": (100, 2), f"{embeddings}.lora_b": (32, 2)})
    # A model without a tensor of the output uses its embeddings there: llama.cpp has no such name.
    with pytest.raises(ValueError, match="its tensor output"):
        check(**{"output.weight.lora_a": (2, 64), "output.weight.lora_b": (100, 2)})


def test_fault_of_an_adapter_is_told_from_that_of_a_disk(tmp_path: Path) -> None:
    misfit, absent = write_misfit(tmp_path / "misfit.gguf"), tmp_path / "absent.gguf"
    for adapter, by_process in ((misfit, True), (absent, False)):
        with pytest.raises(EngineLoadError) as raised:
            load_engine(replace(SPEC, lora_adapters={"one": adapter}))
        assert raised.value.by_process == by_process


def test_process_that_the_kernel_kills_is_no_fault_of_an_adapter() -> None:
    killed = "sh -c 'kill -9 $$'"
    with pytest.raises(EngineLoadError) as raised:
        load_engine(replace(SPEC, options={**SPEC.options, "llama_server": killed}))
    assert not raised.value.by_process
