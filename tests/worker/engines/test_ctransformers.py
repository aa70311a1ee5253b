"""The ctransformers engine: completions from GGUF and GGML files, with its own sampler chain."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_site.catalogue.catalogue import DEMO_FILE
from inference_site.catalogue.engines.registry import model_capabilities
from inference_site.core.domain.deltas import Finish, ReasoningDelta, TextDelta, ToolCallDelta
from inference_site.core.domain.errors import ContextLengthExceeded, EngineLoadError, InvalidRequest
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.request import (
    Constraint,
    GenerationRequest,
    Message,
    Sampling,
    Tool,
)
from tests.sinks import RecordingSink
from tests.tiny_ggml import CONTEXT, write_ggml
from worker.engines.base import Engine, load_engine
from worker.engines.ctransformers.engine import AnswerText, common_prefix, open_model
from worker.engines.ctransformers.sampler import Sampler, dry_penalties, log_probabilities
from worker.engines.ctransformers.vocabulary import Vocabulary

pytestmark = pytest.mark.slow  # It generates with weights.

SPEC = ModelSpec("m", "ctransformers", DEMO_FILE, slots=2, context_length=256)
FRANCE = GenerationRequest(
    "m",
    operation="complete",
    prompts=("The capital of France is",),
    sampling=Sampling(temperature=0, seed=1),
    max_output_tokens=12,
)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    loaded = load_engine(SPEC)
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = tmp_path_factory.mktemp("ggml") / "gpt2.bin"
    write_ggml(path, "gpt2")
    spec = replace(SPEC, file=path, slots=1, context_length=CONTEXT, options={"model_type": "gpt2"})
    loaded = load_engine(spec)
    yield loaded
    loaded.close()


def complete(engine: Engine, request: GenerationRequest, **fields: Any) -> RecordingSink:
    """Run it to the end."""
    sink = RecordingSink()
    engine.run(replace(request, **fields), sink)
    return sink


def test_gguf_file_is_continued(engine: Engine) -> None:
    sink = complete(engine, FRANCE)
    assert sink.text.startswith(" Paris.")
    assert sink.finishes == ["length"]
    assert sink.usage.output_tokens == 12
    assert sink.usage.prefill_ms > 0


TEXTS = ("Hello", " Hello", "<|im_start|>user\nHi<|im_end|>\n", "\n\nA\nb", "naïve 🦊", "   ", "")


def test_prompts_are_the_tokens_that_llama_cpp_makes_of_them(engine: Engine) -> None:
    """The library would put a space before them, which this file says it does not want."""
    reference = load_engine(replace(SPEC, engine="llama_cpp"))
    for text in TEXTS:
        request = GenerationRequest("m", operation="tokenize", prompts=(text,))
        made, other = RecordingSink(), RecordingSink()
        engine.run(request, made)
        reference.run(request, other)
        assert made.deltas == other.deltas, text
    reference.close()


def test_prefix_that_was_read_is_not_read_again(engine: Engine) -> None:
    first = complete(engine, FRANCE, prompts=("One two three four five",))
    again = complete(engine, FRANCE, prompts=("One two three four five",))
    assert again.usage.cached_tokens == first.usage.input_tokens - 1
    assert again.text == first.text
    anew = complete(engine, FRANCE, prompts=("One two three four five",), cache_prompt=False)
    assert (anew.usage.cached_tokens, anew.text) == (0, first.text)


@pytest.mark.parametrize("prompt", ["<|im_start|>", ""])
def test_prompt_that_is_only_repeated_is_counted(engine: Engine, prompt: str) -> None:
    """The estimate of a server that counts nothing would be a token for four characters."""
    answered = complete(engine, FRANCE, prompts=(prompt,), max_output_tokens=1)
    repeated = complete(engine, FRANCE, prompts=(prompt,), max_output_tokens=0, echo=True)
    assert repeated.usage.input_tokens == answered.usage.input_tokens


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        (Constraint("regex", "(yes|no)!", "grammar"), "(yes|no)!"),
        (Constraint("lark", 'start: "a" /b+/ "c"', "grammar"), "ab+c"),
        (Constraint("gbnf", 'root ::= "x" [0-9] "y"', "grammar"), "x[0-9]y"),
        (
            Constraint(
                "llguidance", '{"grammars": [{"lark_grammar": "start: /[pq]{4}/"}]}', "grammar"
            ),
            "[pq]{4}",
        ),
    ],
    ids=lambda value: value.kind if isinstance(value, Constraint) else "",
)
def test_grammar_of_each_kind_is_met(engine: Engine, constraint: Constraint, pattern: str) -> None:
    for seed in range(3):
        sampling = Sampling(temperature=1.5, seed=seed)
        sink = complete(
            engine, FRANCE, constraint=constraint, sampling=sampling, max_output_tokens=60
        )
        if sink.finishes == ["stop"]:
            assert re.fullmatch(pattern, sink.text)


@pytest.mark.parametrize(
    ("kind", "source", "told"),
    [
        ("regex", "a(", "line 1, column 8: .* unclosed group (llguidance)"),
        ("lark", 'start: "a"\n\nx ::= y', "line 3, column 4: Expected .* (llguidance)"),
        ("json_schema", '{"pattern": "(?=a)"}', "regex parse error: look-around.* (llguidance)"),
        ("gbnf", 'root ::= "a" b\nb ::= [0-9', "line 2: cannot read '[0-9'"),
        ("gbnf", 'root ::= "a"\n\n  )', "line 3: ')' belongs to no rule"),
        ("gbnf", 'root ::= b\nb ::= ("a"', "line 2: a group is not closed"),
    ],
)
def test_bad_grammar_is_refused_with_its_line_and_the_reason(
    engine: Engine, kind: Any, source: str, told: str
) -> None:
    pattern = f"^Invalid grammar: {re.escape(told).replace(chr(92) + '.' + chr(92) + '*', '.*')}$"
    with pytest.raises(InvalidRequest, match=pattern) as caught:
        complete(engine, FRANCE, constraint=Constraint(kind, source, "grammar"))
    assert caught.value.param == "grammar"


def test_stop_text_and_stop_token_end_the_answer_and_never_appear(engine: Engine) -> None:
    sink = complete(engine, FRANCE, stop=("nowhere", "aris"))
    assert sink.text == " P"
    assert next(d for d in sink.deltas if isinstance(d, Finish)).stop == "aris"
    ids = RecordingSink()
    engine.run(replace(FRANCE, operation="tokenize", prompts=(".",)), ids)
    dot = ids.deltas[0].ids[-1]  # type: ignore[union-attr]  # A TokensDelta.
    sink = complete(engine, FRANCE, stop_token_ids=(dot,))
    assert sink.text == " Paris"
    assert next(d for d in sink.deltas if isinstance(d, Finish)).stop == dot


def test_choices_and_prompts_have_indices_in_order(engine: Engine) -> None:
    sink = complete(
        engine, FRANCE, prompts=("One", "Two"), choices=2, sampling=Sampling(temperature=1, seed=3)
    )
    assert [d.index for d in sink.deltas if isinstance(d, Finish)] == [0, 1, 2, 3]
    assert sink.usage.output_tokens <= 48


def test_log_probabilities_are_those_of_the_text(engine: Engine) -> None:
    sink = complete(engine, FRANCE, top_logprobs=3)
    entries = [e for d in sink.deltas if isinstance(d, TextDelta) for e in d.logprobs]
    assert b"".join(entry.text_bytes for entry in entries).decode() == sink.text
    for entry in entries:
        assert entry.logprob <= 0
        assert len(entry.top) == 3
        assert entry.top[0].token == entry.token  # Greedy.


def test_a_long_text_is_counted_in_pieces_and_not_for_a_client_that_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, pieces = Vocabulary._found, list[int]()

    def watched(vocabulary: Vocabulary, encoded: bytes) -> list[int]:
        pieces.append(len(encoded))
        return found(vocabulary, encoded)

    monkeypatch.setattr(Vocabulary, "_found", watched)
    engine = open_model(SPEC)
    accents = "\u0301" * 300_000
    with pytest.raises(ContextLengthExceeded, match="an estimated"):
        complete(engine, FRANCE, prompts=(accents,))
    with pytest.raises(ContextLengthExceeded, match="an estimated"):
        engine.run(replace(FRANCE, operation="tokenize", prompts=(accents,)), RecordingSink())
    assert max(pieces) < 70_000
    pieces.clear()
    sink = RecordingSink(cancel_after=0)
    engine.run(replace(FRANCE, operation="tokenize", prompts=(accents,)), sink)
    engine.run(replace(FRANCE, prompts=(accents,)), sink)
    assert (pieces, sink.finishes) == ([], [])


def test_characters_of_many_bytes_overrun_nothing(engine: Engine) -> None:
    sink = RecordingSink()
    text = "🦊" * 40
    engine.run(replace(FRANCE, operation="tokenize", prompts=(text,)), sink)
    ids = sink.deltas[0].ids  # type: ignore[union-attr]  # A TokensDelta.
    assert len(ids) > len(text)
    back = RecordingSink()
    engine.run(replace(FRANCE, operation="detokenize", prompts=(ids,)), back)
    assert back.text.strip() == text


def test_token_that_there_is_not_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="is no token"):
        complete(engine, FRANCE, prompts=((1, 10**6),))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"file": None}, "needs a 'file'"),
        ({"file": Path("/nowhere/m.bin")}, "no such file"),
        ({"file": Path(__file__)}, "set 'model_type'"),
        ({"options": {"lib": "metal"}}, "set 'lib'"),
        ({"options": {"lib": "/nowhere/lib.so"}}, "'lib': Input should be 'avx'"),
        ({"options": {"lib": "../../evil"}}, "'lib': Input should be 'avx'"),
    ],
)
def test_what_cannot_be_loaded_is_told_with_the_fix(change: dict[str, Any], told: str) -> None:
    with pytest.raises(EngineLoadError, match="Model 'm'") as caught:
        load_engine(replace(SPEC, **change))
    assert told in str(caught.value)


# --- The sampler chain ---------------------------------------------------------------------------

LOGITS = np.array([2.0, 1.0, 0.5, -1.0, -3.0], np.float32)


def chosen(sampling: Sampling, times: int = 200, history: list[int] | None = None) -> set[int]:
    """The tokens that come of it."""
    sampler = Sampler(sampling, [], seed=1)
    past = history or []
    return {sampler.choose(LOGITS.copy(), past, past) for _ in range(times)}


@pytest.mark.parametrize(
    ("sampling", "tokens"),
    [
        (Sampling(temperature=0), {0}),
        (Sampling(temperature=5, top_k=2, top_p=1, min_p=0), {0, 1}),
        (Sampling(temperature=5, top_k=0, top_p=0.6, min_p=0), {0}),
        (Sampling(temperature=5, top_k=0, top_p=0.8, min_p=0), {0, 1}),
        (Sampling(temperature=5, top_k=0, top_p=1, min_p=0.2), {0, 1, 2}),
        (Sampling(temperature=5, top_k=0, top_p=1, min_p=0), {0, 1, 2, 3, 4}),
        (Sampling(temperature=0, logit_bias=((4, 100.0),)), {4}),
        (Sampling(temperature=0, logit_bias=((0, -100.0),)), {1}),
        (
            Sampling(
                temperature=5, top_k=0, top_p=1, min_p=0, xtc_probability=1, xtc_threshold=0.1
            ),
            {2, 3, 4},
        ),
    ],
)
def test_each_sampler_leaves_what_it_should(sampling: Sampling, tokens: set[int]) -> None:
    assert chosen(sampling) == tokens


def test_typical_sampling_prefers_the_expected_to_the_likeliest() -> None:
    flat = np.log(np.array([0.4, 0.12, 0.12, 0.12, 0.12, 0.12], np.float32))
    sampler = Sampler(Sampling(temperature=1, top_k=0, top_p=1, min_p=0, typical_p=0.3), [], 1)
    assert 0 not in {sampler.choose(flat.copy(), [], []) for _ in range(100)}


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0, repetition_penalty=3),
        Sampling(temperature=0, presence_penalty=2),
        Sampling(temperature=0, frequency_penalty=2),
    ],
)
def test_penalties_count_what_was_said(sampling: Sampling) -> None:
    assert chosen(sampling, 1, history=[0]) == {1}


def test_dry_forbids_the_longer_repetition_more() -> None:
    sampling = Sampling(dry_multiplier=1, dry_base=2, dry_allowed_length=2)
    history = [1, 2, 3, 4, 9, 1, 2, 3]
    assert dry_penalties(sampling, history, []) == {4: 2.0}
    assert dry_penalties(sampling, history, [frozenset({2})]) == {}
    assert dry_penalties(replace(sampling, dry_penalty_last_n=4), history, []) == {}
    assert dry_penalties(replace(sampling, dry_multiplier=0), history, []) == {}


@pytest.mark.parametrize("temperature", [0, 0.7])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(repetition_penalty=1e300),
        Sampling(dry_multiplier=1e308, dry_base=1.75, dry_allowed_length=0),
        Sampling(dry_multiplier=1, dry_base=1e300, dry_allowed_length=0),
    ],
)
def test_the_only_token_of_a_grammar_stands_the_highest_penalty(
    sampling: Sampling, temperature: float
) -> None:
    sampler = Sampler(replace(sampling, temperature=temperature), [], seed=1)
    logits = np.full(5, -np.inf, np.float32)
    logits[3] = -2.0
    assert sampler.choose(logits, [3] * 80, [3] * 80) == 3


@given(st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=50))
def test_log_probabilities_add_up_to_one(scores: list[float]) -> None:
    total = np.exp(log_probabilities(np.array(scores, np.float32)).astype(np.float64)).sum()
    assert total == pytest.approx(1, abs=1e-4)


@given(st.text(max_size=30), st.lists(st.text(min_size=1, max_size=4), max_size=3), st.data())
def test_any_cutting_of_the_bytes_gives_the_same_text(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    def read(pieces: list[bytes]) -> str:
        answer, shown = AnswerText(stops, 0), ""
        for piece in pieces:
            if delta := answer.feed(piece, None):
                shown += delta.text
            if answer.stop is not None:
                break
        rest = answer.end()
        return shown + (rest.text if rest else "")

    encoded = text.encode("utf-8", "replace")
    cut = data.draw(st.integers(0, len(encoded)))
    whole = encoded.decode()
    ends = [whole.index(stop) for stop in stops if stop in whole]
    expected = whole[: min(ends)] if ends else whole
    assert read([bytes([byte]) for byte in encoded]) == expected
    if not ends:
        assert read([encoded[:cut], encoded[cut:]]) == expected


def test_common_prefix_ends_at_the_first_difference() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 4, 5]) == 2
    assert common_prefix([], [1]) == 0
    assert common_prefix([1, 2], [1, 2, 3]) == 2


# --- Chats, through the adapter ------------------------------------------------------------------

QUESTION = GenerationRequest(
    "m",
    (Message("user", "What is the capital of France?"),),
    Sampling(temperature=0, seed=1),
    max_output_tokens=60,
    template_vars={"enable_thinking": False},
)
WEATHER = Tool(
    "get_weather",
    "Get the weather of a city.",
    {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
)


def chat(engine: Engine, request: GenerationRequest) -> RecordingSink:
    """Run it to the end."""
    sink = RecordingSink()
    engine.run(request, sink)
    return sink


def test_model_with_a_template_chats(engine: Engine) -> None:
    sink = chat(engine, QUESTION)
    assert sink.text == "The capital of France is Paris."
    assert sink.finishes == ["stop"]
    assert "chat" in model_capabilities(SPEC)


def test_model_that_reasons_says_so_apart(engine: Engine) -> None:
    sink = chat(engine, replace(QUESTION, template_vars={"enable_thinking": True}))
    thoughts = [d.text for d in sink.deltas if isinstance(d, ReasoningDelta)]
    assert thoughts
    assert "think" not in sink.text
    assert 0 < sink.usage.reasoning_tokens < sink.usage.output_tokens


@pytest.mark.parametrize("must_call", [False, True])
def test_tool_is_called(engine: Engine, must_call: bool) -> None:
    asked = replace(
        QUESTION,
        messages=(Message("user", "What is the weather in Paris?"),),
        tools=(WEATHER,),
        must_call=must_call,
    )
    sink = chat(engine, asked)
    calls = [d for d in sink.deltas if isinstance(d, ToolCallDelta)]
    assert calls[0].name == "get_weather"
    assert json.loads("".join(call.arguments for call in calls)) == {"city": "Paris"}
    assert (sink.text.strip(), sink.finishes) == ("", ["tool_calls"])


def test_model_without_a_template_has_no_chats(gpt2: Engine, tmp_path: Path) -> None:
    spec = replace(SPEC, file=tmp_path / "gpt2.bin", options={"model_type": "gpt2"})
    assert "chat" not in model_capabilities(spec)
    named = replace(spec, options={**spec.options, "chat_template": "chatml"})
    assert "chat" in model_capabilities(named)
    with pytest.raises(InvalidRequest, match="no chat template"):
        chat(gpt2, QUESTION)
