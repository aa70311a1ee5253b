"""Images in the llama.cpp engine, seen through a tiny projector of random weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inference_site.catalogue.catalogue import DEMO_FILE
from inference_site.catalogue.models_file import read_models_file
from inference_site.core.domain.deltas import ReasoningDelta, TextDelta, TokensDelta
from inference_site.core.domain.errors import ContextLengthExceeded, EngineLoadError, InvalidRequest
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.request import (
    AudioPart,
    Constraint,
    GenerationRequest,
    ImagePart,
    Message,
    Part,
    Sampling,
    TextPart,
    Tool,
)
from tests.images import PARAM, data_url, encoded
from tests.sinks import RecordingSink, answered
from tests.tiny_vision import IMAGE_TOKENS, write_projector
from tests.worker.engines.llama_payloads import chat_payload
from worker.engines.base import Engine, load_engine
from worker.media import resolve_media

EMBEDDING_LENGTH = 192  # Of the demo model.
BLIND = ModelSpec(
    "demo",
    "llama_cpp",
    DEMO_FILE,
    slots=2,
    options={"chat_template_kwargs": {"enable_thinking": False}},
)
HELLO = TextPart("Hello")
THINKING = (
    "{% for m in messages %}{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n"
    "</think>\n\n{% endif %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text or '<__media__>' }}{% endfor %}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<think>\n{% endif %}"
)


def with_projector(path: Path, **options: object) -> ModelSpec:
    return replace(BLIND, options={**BLIND.options, "mmproj": str(path), **options})


@pytest.fixture(scope="module")
def projector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_projector(tmp_path_factory.mktemp("vision") / "mmproj.gguf", EMBEDDING_LENGTH)


@pytest.fixture(scope="module")
def engine(projector: Path) -> Iterator[Engine]:
    loaded = load_engine(with_projector(projector))
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def thinking(projector: Path) -> Iterator[Engine]:
    """The model with a template that begins each answer with thoughts."""
    template = projector.with_name("thinking.jinja")
    template.write_text(THINKING)
    loaded = load_engine(with_projector(projector, chat_template=str(template)))
    yield loaded
    loaded.close()


def picture(color: str, size: tuple[int, int] = (40, 30)) -> ImagePart:
    return ImagePart(data_url(encoded("PNG", size, color)), PARAM)


RED, BLUE = picture("red"), picture("blue")


def request_of(*parts: Part, choices: int = 1) -> GenerationRequest:
    return GenerationRequest(
        "demo",
        messages=(Message("user", None, parts=parts),),
        sampling=Sampling(temperature=0),
        max_output_tokens=8,
        top_logprobs=0,
        choices=choices,
    )


def ask(engine: Engine, *parts: Part, choices: int = 1) -> RecordingSink:
    sink = RecordingSink()
    engine.run(request_of(*parts, choices=choices), sink)
    return sink


def first_logprob(engine: Engine, *parts: Part) -> float:
    sink = ask(engine, *parts)
    first = next(delta for delta in sink.deltas if isinstance(delta, TextDelta))
    return first.logprobs[0].logprob


def test_an_image_takes_its_tokens_of_the_prompt(engine: Engine) -> None:
    without, sink = ask(engine, HELLO), ask(engine, HELLO, RED)
    assert sink.usage.input_tokens == without.usage.input_tokens + IMAGE_TOKENS
    assert sink.usage.output_tokens > 0
    assert len(sink.finishes) == 1


def test_an_image_of_any_size_is_taken(engine: Engine) -> None:
    for size in [(1, 1), (1, 300), (640, 480)]:
        assert ask(engine, HELLO, picture("red", size)).usage.output_tokens > 0


def test_another_image_gets_another_answer(engine: Engine) -> None:
    assert ask(engine, HELLO, RED).text != ask(engine, HELLO, BLUE).text


def test_the_same_image_gets_the_same_answer(engine: Engine) -> None:
    assert ask(engine, HELLO, RED).text == ask(engine, HELLO, RED).text


def test_an_image_that_was_seen_before_comes_from_the_cache(engine: Engine) -> None:
    text = TextPart("A text that no other test has sent: nine grey plums.")
    fresh, again = ask(engine, RED, text).usage, ask(engine, RED, text).usage
    assert again.input_tokens == fresh.input_tokens
    assert again.cached_tokens > IMAGE_TOKENS


def test_the_order_of_images_and_text_reaches_the_model(engine: Engine) -> None:
    orders: list[tuple[Part, ...]] = [
        (RED, BLUE, HELLO),
        (BLUE, RED, HELLO),
        (RED, HELLO, BLUE),
        (HELLO, RED, BLUE),
        (HELLO, BLUE, RED),
    ]
    sinks = [ask(engine, *parts) for parts in orders]
    tokens = ask(engine, HELLO).usage.input_tokens + 2 * IMAGE_TOKENS
    assert {sink.usage.input_tokens for sink in sinks} == {tokens}
    assert len({first_logprob(engine, *parts) for parts in orders}) == len(orders)


@pytest.mark.parametrize("format_", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_every_format_that_is_taken_is_read(engine: Engine, format_: str) -> None:
    image = ImagePart(data_url(encoded(format_, (40, 30))), "p")
    sink = RecordingSink()
    engine.run(resolve_media(request_of(HELLO, image), 1), sink)
    tokens = ask(engine, HELLO).usage.input_tokens + IMAGE_TOKENS
    assert sink.usage.input_tokens == tokens


def test_choices_share_the_image(engine: Engine) -> None:
    one, two = ask(engine, HELLO, RED), ask(engine, HELLO, RED, choices=2)
    assert two.usage.input_tokens == one.usage.input_tokens
    assert len(two.finishes) == 2
    for choice in (0, 1):
        said = [d.text for d in two.deltas if isinstance(d, TextDelta) and d.index == choice]
        assert "".join(said) == one.text


def test_images_beyond_the_context_are_told_as_such(engine: Engine) -> None:
    with pytest.raises(ContextLengthExceeded) as caught:
        ask(engine, *[RED] * (BLIND.context_length // IMAGE_TOKENS + 1))
    assert caught.value.input_tokens > BLIND.context_length


def test_a_text_that_looks_like_an_image_is_text(engine: Engine) -> None:
    text = TextPart("<__media__> <image>")
    assert ask(engine, text, RED).usage.output_tokens > 0


def test_what_is_no_image_is_the_clients_fault(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="Failed to load image"):
        ask(engine, ImagePart(data_url(b"\x89PNG\r\n\x1a\n"), "p"))
    assert ask(engine, HELLO).usage.output_tokens > 0


def test_completions_of_a_model_with_a_projector(engine: Engine) -> None:
    """Beside a projector, llama.cpp's completions take one text, no list and no tokens."""
    asked = GenerationRequest(
        "demo",
        operation="complete",
        prompts=("Once upon a time",),
        sampling=Sampling(temperature=0),
        max_output_tokens=3,
    )

    def completed(**fields: Any) -> RecordingSink:
        sink = RecordingSink()
        engine.run(replace(asked, **fields), sink)
        return sink

    answer = completed()
    assert answer.text
    tokens = RecordingSink()
    texts = (*asked.prompts, "On", "ce")
    engine.run(replace(asked, operation="tokenize", prompts=texts), tokens)
    ids, *halves = [delta.ids for delta in tokens.deltas if isinstance(delta, TokensDelta)]
    assert answer.usage.input_tokens == len(ids)
    assert completed(prompts=(ids,)).text == completed(prompt_logprobs=1).text == answer.text
    for top in (None, 0):
        echoed = completed(echo=True, top_logprobs=top)
        assert echoed.text == f"{asked.prompts[0]}{answer.text}"
    with pytest.raises(InvalidRequest, match="one prompt in a request") as caught:
        completed(prompts=("One", "Two"))
    assert caught.value.param == "prompt"
    with pytest.raises(InvalidRequest, match="no text has these tokens"):
        completed(prompts=((*halves[0], *halves[1][1:]),))


@pytest.mark.parametrize("starts", [False, True], ids=["run", "start"])
def test_thoughts_that_are_begun_beside_an_image_are_ended(thinking: Engine, starts: bool) -> None:
    """A grammar would bind them, and the answer would be empty."""

    def thought(**fields: Any) -> RecordingSink:
        return answered(thinking, replace(request_of(HELLO, RED), **fields), starts=starts)

    assert thoughts(thought())
    bound = Constraint("regex", "yes|no", "grammar")
    tool = Tool("f", None, {"properties": {}, "additionalProperties": False})
    for fields in ({}, {"reasoning_budget": 0}, {"reasoning_budget": 3}):
        answer = thought(constraint=bound, **fields)
        assert answer.text in ("yes", "no")
        assert not thoughts(answer)
        forced = thought(
            tools=(tool,), must_call=True, top_logprobs=None, max_output_tokens=40, **fields
        )
        assert forced.finishes == ["tool_calls"]
    answer = thought(reasoning_budget=0)
    assert answer.text.strip()
    assert not thoughts(answer)
    before = Message("assistant", "Hello.")
    said = (*request_of(HELLO, RED).messages, before)
    assert thought(messages=said, constraint=bound).usage.output_tokens > 0


def thoughts(answer: RecordingSink) -> str:
    return "".join(d.text for d in answer.deltas if isinstance(d, ReasoningDelta))


def test_no_thoughts_beside_an_image_end_the_thoughts_that_are_begun(projector: Path) -> None:
    """With a budget of 0, llama.cpp leaves out the first token of their end."""
    payload = chat_payload(
        replace(request_of(HELLO, RED), reasoning_budget=0), with_projector(projector)
    )
    assert payload["thinking_budget_tokens"] == 1


def test_parts_are_encoded_in_their_order(projector: Path) -> None:
    spec = with_projector(projector, modalities=["vision", "audio"])
    payload = chat_payload(request_of(RED, HELLO, AudioPart("UklG", "wav", "p")), spec)
    assert payload["messages"][0]["content"] == [
        {"type": "image_url", "image_url": {"url": RED.url}},
        {"type": "text", "text": "Hello"},
        {"type": "input_audio", "input_audio": {"data": "UklG", "format": "wav"}},
    ]


def test_a_model_without_a_projector_takes_no_images() -> None:
    with pytest.raises(InvalidRequest, match="The model 'demo' takes no images") as caught:
        chat_payload(request_of(HELLO, RED), BLIND)
    assert caught.value.param == RED.param


def test_a_projector_is_for_images_unless_the_models_file_says_more(projector: Path) -> None:
    sound = AudioPart("UklG", "wav", "messages[0].content[0].input_audio")
    with pytest.raises(InvalidRequest, match="takes no audio") as caught:
        chat_payload(request_of(sound), with_projector(projector))
    assert caught.value.param == sound.param
    with pytest.raises(InvalidRequest, match="takes no images"):
        chat_payload(request_of(RED), with_projector(projector, modalities=["audio"]))


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/a.png", "file:///etc/passwd", "/etc/passwd"])
def test_llama_cpp_is_never_given_an_address(projector: Path, url: str) -> None:
    with pytest.raises(InvalidRequest, match="was not fetched"):
        chat_payload(request_of(ImagePart(url, "p")), with_projector(projector))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot read .*: No such file or directory"),
        (b"PK\x03\x04 a zip file", "is not a GGUF file"),
        (b"GGUF", "could not load .* with "),
        (DEMO_FILE.read_bytes(), "could not load .* with "),
    ],
    ids=["missing", "another format", "only the magic", "a language model"],
)
def test_a_bad_projector_is_named(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "bad.gguf"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(EngineLoadError, match=reason) as caught:
        load_engine(with_projector(path))
    assert str(caught.value).startswith("Model 'demo': ")
    assert str(path) in str(caught.value)


def test_a_projector_for_another_model_is_named(tmp_path: Path) -> None:
    path = write_projector(tmp_path / "other.gguf", EMBEDDING_LENGTH // 2)
    with pytest.raises(EngineLoadError, match=f"with {path}"):
        load_engine(with_projector(path))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mmproj": [5]}, "'mmproj': Input should be a valid string"),
        ({"modalities": ["vision"]}, "'modalities': needs a projector"),
        ({"modalities": "vision"}, "'modalities': must be a list"),
        ({"modalities": ["smell"]}, "'modalities.0': Input should be 'vision' or 'audio'"),
        ({"modalities": [["vision"]]}, "'modalities.0': Input should be 'vision' or 'audio'"),
    ],
)
def test_an_option_that_makes_no_sense_is_told(options: dict[str, object], reason: str) -> None:
    with pytest.raises(EngineLoadError, match=f"Model 'demo': {reason}"):
        load_engine(replace(BLIND, options=options))


def test_the_projector_is_found_beside_the_models_file(tmp_path: Path) -> None:
    models_file = tmp_path / "models.yaml"
    models_file.write_text(
        "models: {a: {file: a.gguf, mmproj: sub/p.gguf}, b: {file: b.gguf, mmproj: /p.gguf}}"
    )
    one, other = read_models_file(models_file)
    assert one.options == {"mmproj": str(tmp_path / "sub/p.gguf")}
    assert other.options == {"mmproj": "/p.gguf"}
