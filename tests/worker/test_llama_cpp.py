"""What is llama.cpp's alone: weights, samplers, its cache, and the ways loading can fail."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sinks import RecordingSink
from worker.catalog import DEMO_FILE
from worker.engines.base import Engine, EngineLoadError, ModelSpec
from worker.engines.registry import load_engine
from worker.generation import GenerationRequest, Message, ReasoningDelta, Sampling

SPEC = ModelSpec(
    "demo", "llama_cpp", DEMO_FILE, options={"chat_template_kwargs": {"enable_thinking": False}}
)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    loaded = load_engine(replace(SPEC, slots=1))
    yield loaded
    loaded.close()


def ask(engine: Engine, text: str, sampling: Sampling | None = None) -> RecordingSink:
    request = GenerationRequest(
        "demo", (Message("user", text),), sampling or Sampling(temperature=0), max_output_tokens=40
    )
    sink = RecordingSink()
    engine.chat(request, sink)
    return sink


STORY = "Tell me a story."


def test_temperature_zero_leaves_nothing_to_chance(engine: Engine) -> None:
    texts = {ask(engine, STORY, Sampling(temperature=0, seed=seed)).text for seed in range(4)}
    assert len(texts) == 1


def test_a_seed_repeats_an_answer_and_another_gives_another(engine: Engine) -> None:
    def told(seed: int) -> str:
        return ask(engine, STORY, Sampling(temperature=1.5, seed=seed)).text

    assert [told(seed) for seed in (1, 2, 1, 2)] == [told(1), told(2)] * 2
    assert told(1) != told(2)


def test_top_p_of_nearly_nothing_leaves_only_the_likeliest(engine: Engine) -> None:
    texts = {ask(engine, STORY, Sampling(2.0, top_p=0.0, seed=seed)).text for seed in range(3)}
    assert texts == {ask(engine, STORY).text}


def test_a_repeated_prompt_comes_from_the_cache(engine: Engine) -> None:
    fresh = "A prompt that no other test has sent: seven purple walnuts."
    first, second = ask(engine, fresh).usage, ask(engine, fresh).usage
    assert first.input_tokens == second.input_tokens
    assert first.cached_tokens < second.cached_tokens < second.input_tokens


def test_reasoning_is_kept_apart_from_the_answer() -> None:
    thinking = load_engine(
        replace(SPEC, slots=1, options={"chat_template_kwargs": {"enable_thinking": True}})
    )
    sink = RecordingSink()
    question = (Message("user", "What is 2 + 3?"),)
    thinking.chat(GenerationRequest("demo", question, Sampling(temperature=0)), sink)
    thinking.close()
    assert any(isinstance(delta, ReasoningDelta) for delta in sink.deltas)
    assert "<think>" not in sink.text
    assert sink.text


class ImpatientSink(RecordingSink):
    """Is cancelled from the second look on."""

    looks = 0

    @property
    def cancelled(self) -> bool:
        self.looks += 1
        return self.looks > 1

    @cancelled.setter
    def cancelled(self, value: bool) -> None:
        """Nothing: only the looks count."""


def test_a_long_prompt_is_abandoned_between_two_batches(engine: Engine) -> None:
    sink = ImpatientSink()
    prompt = Message("user", "word " * 1800)
    engine.chat(GenerationRequest("demo", (prompt,)), sink)
    assert (sink.pieces, sink.finishes) == ([], [])
    assert 0 < sink.usage.input_tokens < 1800


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot read .*: No such file or directory"),
        (b"", "is not a GGUF file"),
        (b"PK\x03\x04 a zip file", "is not a GGUF file"),
        (b"GGUF", "could not load"),
        (DEMO_FILE.read_bytes()[:100_000], "could not load"),
    ],
    ids=["missing", "empty", "another format", "only the magic", "cut off"],
)
def test_a_bad_file_is_named_with_the_model_and_the_reason(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    path = tmp_path / "bad.gguf"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(EngineLoadError, match=reason) as caught:
        load_engine(replace(SPEC, file=path))
    assert str(caught.value).startswith("Model 'demo': ")
    assert str(path) in str(caught.value)


def test_a_folder_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(EngineLoadError, match=r"Model 'demo': cannot read .*: Is a directory"):
        load_engine(replace(SPEC, file=tmp_path))


def test_a_model_without_a_file_is_told_so() -> None:
    with pytest.raises(EngineLoadError, match=r"Model 'demo': .* needs a 'file'"):
        load_engine(replace(SPEC, file=None))


def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    with pytest.raises(EngineLoadError, match="Model 'demo': engine 'llama_cpp' is not installed"):
        load_engine(SPEC)
