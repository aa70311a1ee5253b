"""What is llama.cpp's alone: weights, samplers, its cache, and the ways loading can fail."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any

import psutil
import pytest

from inference_site.catalogue.catalogue import DEMO_FILE
from inference_site.catalogue.engines.llama_cpp import LlamaCppOptions, marks
from inference_site.core.domain.deltas import (
    Delta,
    Finish,
    PromptDelta,
    PromptProgress,
    ReasoningDelta,
    TextDelta,
    TokensDelta,
)
from inference_site.core.domain.errors import ContextLengthExceeded, EngineLoadError, InvalidRequest
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.request import (
    Constraint,
    GenerationRequest,
    Message,
    Sampling,
    Tool,
)
from inference_site.core.host import free_port
from tests.served_stack import ROOT
from tests.sinks import RecordingSink, answered
from tests.tiny_weights import write_model
from tests.waiting import wait_until
from worker.engines import own_server
from worker.engines.base import Engine, load_engine
from worker.engines.llama_cpp.chat import TemplateTrial
from worker.engines.llama_cpp.engine import checked
from worker.engines.openai_upstream.client import Upstream
from worker.model_servers import llama_server
from worker.model_servers.llama_server import arguments, parameters
from worker.model_servers.process import server_settings

SPEC = ModelSpec(
    "demo", "llama_cpp", DEMO_FILE, options={"chat_template_kwargs": {"enable_thinking": False}}
)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    loaded = load_engine(replace(SPEC, slots=1))
    yield loaded
    loaded.close()


def ask(engine: Engine, text: str) -> RecordingSink:
    request = GenerationRequest(
        "demo", (Message("user", text),), Sampling(temperature=0), max_output_tokens=40
    )
    sink = RecordingSink()
    engine.run(request, sink)
    return sink


STORY = "Tell me a story."


@pytest.mark.parametrize(
    ("names", "order"),
    [
        (("▁<PRE>", "▁<SUF>", "▁<MID>"), ["▁<PRE>", "▁<SUF>", "▁<MID>"]),
        (("[PREFIX]", "[MIDDLE]", "[SUFFIX]"), ["[SUFFIX]", "[PREFIX]"]),
    ],
)
def test_marks_of_a_file_are_tokens_of_the_prompt(
    tmp_path: Path, names: tuple[str, ...], order: list[str]
) -> None:
    controls = dict(enumerate(names, 2000))
    file = write_model(tmp_path / "coder.gguf", control_tokens=controls)
    spec = replace(SPEC, file=file, slots=1)
    own = marks(spec)
    assert own is not None
    coder = load_engine(spec)
    asked: dict[str, Any] = {"operation": "tokenize", "prompts": (own.around("x = 1", "print(x)"),)}
    sink = RecordingSink()
    coder.run(GenerationRequest("demo", **asked), sink)
    coder.close()
    [found] = [delta for delta in sink.deltas if isinstance(delta, TokensDelta)]
    assert [controls[id_] for id_ in found.ids if id_ in controls] == order


@pytest.mark.parametrize("echo", [False, True])
def test_empty_prompt_is_the_beginning_of_a_text(tmp_path: Path, echo: bool) -> None:
    """Also of models whose prompts begin with no token: llama.cpp generates nothing from none."""
    file = write_model(tmp_path / "qwen.gguf", adds_bos=False)
    loaded = load_engine(replace(SPEC, file=file, slots=1))
    asked: dict[str, Any] = {"operation": "complete", "prompts": ("",), "max_output_tokens": 5}
    sinks = [RecordingSink(), RecordingSink()]
    loaded.run(GenerationRequest("demo", **asked, echo=echo), sinks[0])
    loaded.run(GenerationRequest("demo", **asked | {"prompts": ("", "Hi")}), sinks[1])
    loaded.close()
    assert (sinks[0].usage.input_tokens, sinks[0].usage.output_tokens) == (1, 5)
    assert sinks[1].usage.output_tokens == 10


class ImpatientSink(RecordingSink):
    """Cancels itself once it is told how much of the prompt has been read."""

    def feed(self, delta: Delta) -> None:
        super().feed(delta)
        self.cancelled |= isinstance(delta, PromptProgress)


def test_a_long_prompt_is_abandoned_between_two_batches() -> None:
    spec = replace(SPEC, options={**SPEC.options, "n_batch": 256})
    engine = load_engine(spec)
    sink = ImpatientSink()
    prompt = Message("user", "word " * 1600)
    engine.run(GenerationRequest("demo", (prompt,), return_progress=True), sink)
    engine.close()
    assert (sink.pieces, sink.finishes) == ([], [])
    assert 0 < sink.usage.input_tokens < 1600


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


@pytest.mark.parametrize(
    "options",
    [
        {
            "cache_type_k": "q8_0",
            "cache_type_v": "q8_0",
            "flash_attn": True,
            "n_batch": 64,
            "n_ubatch": 32,
            "rope_scaling": "none",
            "rope_freq_base": 1e4,
            "main_gpu": 0,
            "rope_freq_scale": 1.0,
            "yarn_orig_ctx": 256,
            "split_mode": "layer",
            "mlock": True,
            "tensor_split": [1, 0.5],
            "numa": "distribute",
        },
        {
            "draft_model": str(DEMO_FILE),
            "draft_max": 8,
            "draft_min": 1,
            "draft_p_min": 0.1,
            "draft_gpu_layers": 0,
            "flash_attn": False,
        },
    ],
    ids=["all", "draft"],
)
def test_its_own_options_are_llama_cpps_and_change_no_answer(
    engine: Engine, options: dict[str, Any]
) -> None:
    checked = LlamaCppOptions.read(options).model_dump(exclude_unset=True)
    spec = replace(SPEC, slots=1, context_length=256, options={**SPEC.options, **checked})
    asked = GenerationRequest(
        "demo",
        (Message("user", "Count from 1 to 20."),),
        Sampling(temperature=0, seed=1),
        max_output_tokens=12,
    )
    expected, sink = RecordingSink(), RecordingSink()
    engine.run(asked, expected)
    tuned = load_engine(spec)
    tuned.run(asked, sink)
    tuned.close()
    assert sink.text == expected.text


def test_options_of_gpus_reach_llama_cpp() -> None:
    """As parameters; a machine without a GPU cannot show more."""
    import xllamacpp

    options = LlamaCppOptions.read(
        {
            "split_mode": "row",
            "main_gpu": 1,
            "tensor_split": [3, 1],
            "cache_type_k": "q8_0",
            "draft_model": str(DEMO_FILE),
            "draft_gpu_layers": 7,
            "flash_attn": True,
        }
    )
    spec = replace(SPEC, gpu_layers=33, options=options.model_dump(exclude_unset=True))
    params = _parameters(spec)
    assert (params.n_gpu_layers, params.main_gpu) == (33, 1)
    assert list(params.tensor_split)[:3] == [3.0, 1.0, 0.0]
    assert params.split_mode == xllamacpp.llama_split_mode.LLAMA_SPLIT_MODE_ROW
    assert params.cache_type_k == xllamacpp.ggml_type.GGML_TYPE_Q8_0
    assert params.speculative.draft.n_gpu_layers == 7
    enabled = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    assert params.flash_attn_type == enabled
    assert _parameters(SPEC).n_gpu_layers == -1  # All that fit.


def _parameters(spec: ModelSpec) -> Any:
    """Return what the library is given by the server's program."""
    words = checked(spec)
    program = next(n for n, word in enumerate(words) if word.startswith("--"))
    return parameters(arguments(words[program:]))


def test_a_draft_model_that_is_missing_is_named(tmp_path: Path) -> None:
    options = {"draft_model": str(tmp_path / "gone.gguf")}
    with pytest.raises(EngineLoadError, match=r"cannot read .*gone\.gguf: No such file"):
        load_engine(replace(SPEC, options=options))


def test_a_folder_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(EngineLoadError, match=r"Model 'demo': cannot read .*: Is a directory"):
        load_engine(replace(SPEC, file=tmp_path))


def test_a_model_without_a_file_is_told_so() -> None:
    with pytest.raises(EngineLoadError, match=r"Model 'demo': .* needs a 'file'"):
        load_engine(replace(SPEC, file=None))


def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    told = r"Model 'demo': engine 'llama_cpp' is not installed \(.*xllamacpp.*'llama-cpp' of py"
    with pytest.raises(EngineLoadError, match=told):
        load_engine(SPEC)


def rendered(engine: Engine, request: GenerationRequest) -> str:
    sink = RecordingSink()
    engine.run(replace(request, operation="render"), sink)
    return next(delta.text for delta in sink.deltas if isinstance(delta, PromptDelta))


@pytest.fixture
def templated(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """The model with a chat template of its entry: a family's name, or the text of a file."""
    name = request.param
    if "{" in name:
        (tmp_path / "mine.jinja").write_text(name)
        name = str(tmp_path / "mine.jinja")
    loaded = load_engine(replace(SPEC, slots=1, options={"chat_template": name}))
    yield loaded
    loaded.close()


@pytest.mark.parametrize(
    ("templated", "prompt"),
    [
        ("phi3", "<|user|>\nHi<|end|>\n<|assistant|>\n"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}!{% endfor %}", "user: Hi!"),
    ],
    indirect=["templated"],
)
def test_chat_template_of_the_entry_takes_the_place_of_the_files(
    templated: Engine, prompt: str
) -> None:
    asked = GenerationRequest("demo", (Message("user", "Hi"),), Sampling(temperature=0))
    assert rendered(templated, asked) == prompt
    sink = RecordingSink()
    templated.run(replace(asked, max_output_tokens=5), sink)
    assert sink.usage.output_tokens > 0


THINKING = (
    "{% for m in messages %}{{ m.role }}: {% if m.reasoning_content %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: <think>\n{% endif %}"
)


@pytest.mark.parametrize("templated", [THINKING], indirect=True, ids=["thoughts"])
@pytest.mark.parametrize("starts", [False, True], ids=["run", "start"])
def test_a_grammar_binds_the_answer_of_a_template_that_begins_thoughts(
    templated: Engine, starts: bool
) -> None:
    asked = GenerationRequest(
        "demo",
        (Message("user", "Hi"),),
        constraint=Constraint("regex", "yes|no", "grammar"),
        max_output_tokens=20,
        template_vars={"enable_thinking": True},
    )
    assert rendered(templated, asked).endswith("</think>\n\n")
    sink = answered(templated, asked, starts=starts)
    assert sink.text in ("yes", "no")
    assert not any(isinstance(delta, ReasoningDelta) for delta in sink.deltas)
    sink = RecordingSink()
    templated.run(replace(asked, constraint=None), sink)
    assert any(isinstance(delta, ReasoningDelta) for delta in sink.deltas)


@pytest.mark.parametrize("templated", [THINKING], indirect=True, ids=["thoughts"])
@pytest.mark.parametrize("budget", [None, 0, 3])
def test_a_forced_call_without_thoughts_ends_those_that_a_template_begins(
    templated: Engine, budget: int | None
) -> None:
    asked = GenerationRequest(
        "demo",
        (Message("user", "Hi"),),
        tools=(Tool("f", None, {"properties": {}, "additionalProperties": False}),),
        must_call=True,
        max_output_tokens=40,
        reasoning_budget=budget,
        template_vars={"enable_thinking": False},
    )
    sink = RecordingSink()
    templated.run(asked, sink)
    assert sink.finishes == ["tool_calls"]
    assert not any(isinstance(delta, ReasoningDelta) for delta in sink.deltas)


@pytest.mark.parametrize("templated", [THINKING], indirect=True, ids=["thoughts"])
def test_without_a_budget_the_thoughts_that_a_template_begins_are_ended(templated: Engine) -> None:
    asked = GenerationRequest(
        "demo", (Message("user", "Hi"),), max_output_tokens=5, reasoning_budget=0
    )
    sink = RecordingSink()
    templated.run(asked, sink)
    assert sink.text
    assert not any(isinstance(delta, ReasoningDelta) for delta in sink.deltas)
    # The prompt that is shown is that of the run, and the answer's beginning is no thought.
    assert rendered(templated, asked).endswith("assistant: <think>\n</think>\n\n")
    prefixed = replace(asked, response_prefix="Yes, ")
    assert rendered(templated, prefixed).endswith("<think>\n</think>\n\nYes, ")


@pytest.mark.parametrize("templated", ["phi3"], indirect=True)
def test_what_ends_a_turn_of_the_family_ends_the_answer_and_is_no_stop_text(
    templated: Engine,
) -> None:
    asked = GenerationRequest(
        "demo",
        (Message("user", "Hi"),),
        Sampling(temperature=0),
        constraint=Constraint("regex", r"yes<\|end\|>no", "grammar"),
        stop=("never",),
    )
    sink = RecordingSink()
    templated.run(asked, sink)
    assert sink.text == "yes"
    assert [d.stop for d in sink.deltas if isinstance(d, Finish)] == [None]
    sink = RecordingSink()
    templated.run(replace(asked, stop=("es",)), sink)
    assert (sink.text, sink.finishes) == ("y", ["stop"])
    assert [d.stop for d in sink.deltas if isinstance(d, Finish)] == ["es"]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "Could not find a chat template"),
        (" \n", "must be a template"),
        ("{% for x %}", "or a chat template that is not valid"),
    ],
)
def test_chat_template_that_is_none_is_told(tmp_path: Path, content: str | None, told: str) -> None:
    path = tmp_path / "mine.jinja"
    if content is not None:
        path.write_text(content)
    with pytest.raises(EngineLoadError, match=f"Model 'demo': .*{told}"):
        load_engine(replace(SPEC, options={"chat_template": str(path)}))


LOOPS = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
GROWTH = (
    "{% set n = namespace(x='a' * 16) %}{% for a in range(6) %}"
    "{% set n.x = n.x | replace('a', 'a' * 16) %}{% endfor %}{{ n.x }}"
)


@pytest.mark.parametrize("hostile", [LOOPS, GROWTH], ids=["loops", "growth"])
def test_hostile_template_of_a_file_is_not_loaded(tmp_path: Path, hostile: str) -> None:
    path = tmp_path / "hostile.gguf"
    with pytest.raises(EngineLoadError, match="its chat template: the template takes too much"):
        load_engine(replace(SPEC, file=write_model(path, chat_template=hostile)))


@pytest.mark.parametrize(
    "templated",
    [f"{{% if messages[0].content == 'go' %}}{LOOPS}{GROWTH}{{% endif %}}Hi"],
    indirect=True,
)
def test_hostile_template_that_waits_for_a_word_ends_that_request_alone(
    templated: Engine, engine: Engine
) -> None:
    with ThreadPoolExecutor(1) as pool:
        attacks = [pool.submit(ask, templated, "go") for _ in range(2)]
        while not all(attack.done() for attack in attacks):
            assert ask(engine, STORY).text
            assert ask(templated, STORY).usage.output_tokens
    for attack in attacks:
        with pytest.raises(InvalidRequest, match="template takes too much"):
            attack.result()


def test_tools_stand_in_the_system_text_once_whoever_reads_the_answer(tmp_path: Path) -> None:
    (tmp_path / "bare.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    options = {"chat_template": str(tmp_path / "bare.jinja"), "tool_format": "hermes"}
    loaded = load_engine(replace(SPEC, slots=1, options=options))
    try:
        tools = (Tool("bare", None, {}),)
        asked = GenerationRequest("demo", (Message("user", "Hi"),), tools=tools, must_call=True)
        assert rendered(loaded, asked).count("You can call these functions") == 1
    finally:
        loaded.close()


def test_template_is_shown_the_same_tools_whether_a_call_is_forced_or_not(engine: Engine) -> None:
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools = (Tool("weather", "Of a city", city), Tool("bare", None, {}))
    asked = GenerationRequest("demo", (Message("user", "Hi"),), tools=tools)
    prompt = rendered(engine, asked)
    assert '"weather", "description": "Of a city", "parameters": {"type"' in prompt
    assert rendered(engine, replace(asked, must_call=True)) == prompt


ACCENTS = "e" + "\u0301" * 300_000
"""Of characters that the vocabulary does not have: the library takes the square of their number."""


class Watched:
    """How many characters llama.cpp's server is given to tokenize, and what it generates."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.characters: list[int] = []
        self.streams: list[Any] = []
        post, stream = Upstream.post, Upstream.stream

        async def posted(
            upstream: Upstream, path: str, payload: Any, *rest: Any, **options: Any
        ) -> Any:
            if path == "/tokenize":
                self.characters.append(len(payload["content"]))
            return await post(upstream, path, payload, *rest, **options)

        async def streamed(upstream: Upstream, path: str, payload: Any, reader: Any) -> None:
            self.streams.append(payload)
            await stream(upstream, path, payload, reader)

        monkeypatch.setattr(Upstream, "post", posted)
        monkeypatch.setattr(Upstream, "stream", streamed)


@pytest.mark.parametrize("operation", ["chat", "render", "tokenize", "complete"])
def test_a_long_text_is_refused_without_a_long_call(
    engine: Engine, operation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch)
    is_chat = operation in ("chat", "render")
    given: dict[str, Any] = {"messages": (Message("user", ACCENTS),)}
    given = given if is_chat else {"prompts": (ACCENTS,)}
    request = GenerationRequest("demo", operation=operation, **given)
    ended: Queue[Exception | None] = Queue()
    assert engine.start(request, RecordingSink(), ended.put)
    refusal = ended.get(timeout=60)
    assert isinstance(refusal, ContextLengthExceeded)
    assert refusal.param == ("messages" if is_chat else "prompt")
    assert refusal.input_tokens == pytest.approx(600_000, rel=0.05)
    assert max(watched.characters) <= 8_192
    assert len(watched.characters) <= 6
    assert watched.streams == []


def test_a_long_text_that_may_be_tokenized_has_the_tokens_of_one_call(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "Once upon a time there was a fox. " * 4_000
    watched, sink = Watched(monkeypatch), RecordingSink()
    engine.run(GenerationRequest("demo", operation="tokenize", prompts=(text,)), sink)
    assert watched.characters[-1] == len(text)
    assert len(sink.deltas[0].ids) > 30_000  # type: ignore[union-attr]  # A TokensDelta.


def test_an_idle_server_has_no_open_connection(engine: Engine) -> None:
    """llama.cpp looks at each of them 100 times a second, and is asked every few seconds."""
    ask(engine, STORY)
    started = psutil.Process().children(recursive=True)
    servers = [one for one in started if llama_server.__file__ in one.cmdline()]
    assert servers

    def none_is_open() -> bool:
        time.sleep(0.1)
        return not any(
            connection.status == psutil.CONN_ESTABLISHED
            for server in servers
            for connection in server.net_connections("inet")
        )

    wait_until(lambda: all(none_is_open() for _ in range(20)), 20)


@pytest.mark.parametrize("operation", ["chat", "render", "tokenize", "complete"])
def test_nothing_is_begun_for_a_client_that_has_left(
    engine: Engine, operation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched, sink = Watched(monkeypatch), RecordingSink(cancel_after=0)
    # It would render the template.
    monkeypatch.setattr(TemplateTrial, "check", lambda *_: pytest.fail("it was rendered"))
    given: dict[str, Any] = {"messages": (Message("user", ACCENTS),), "prompts": (ACCENTS,)}
    assert not engine.start(GenerationRequest("demo", operation=operation, **given), sink, print)
    assert (watched.characters, watched.streams, sink.deltas) == ([], [], [])


def test_many_prompts_are_tokenized_one_by_one(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp would take all of them in one call."""
    prompts = tuple(f"Once upon a time there was a fox, number {n}. " * 20 for n in range(20))
    request = GenerationRequest(
        "demo", operation="complete", prompts=prompts[:2], sampling=Sampling(temperature=0)
    )
    short = replace(request, max_output_tokens=4)
    watched = Watched(monkeypatch)
    few, many = RecordingSink(), RecordingSink()
    engine.run(short, few)
    engine.run(replace(short, prompts=prompts), many)
    given = [payload["prompt"] for payload in watched.streams]
    assert given[0] == list(prompts[:2])
    assert all(isinstance(token, int) for tokens in given[1] for token in tokens)
    texts = [
        ["".join(d.text for d in sink.deltas if isinstance(d, TextDelta) and d.index == n)]
        for sink in (few, many)
        for n in range(2)
    ]
    assert texts[:2] == texts[2:]
    assert (len(few.finishes), len(many.finishes)) == (2, 20)
    with pytest.raises(ContextLengthExceeded) as caught:
        engine.run(replace(short, prompts=(*prompts, "word " * 3_000)), RecordingSink())
    assert caught.value.param == "prompt"
    assert len(watched.streams) == 2


def test_another_build_of_the_server_takes_the_same_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands for the wheel's server here; what is compared is how it is started."""
    noted = tmp_path / "arguments"
    build = tmp_path / "llama-server"
    program = f"{sys.executable} -I {llama_server.__file__}"
    build.write_text(f'#!/bin/sh\necho "$@" > {noted}\nexec {program} "$@"\n')
    build.chmod(0o755)
    monkeypatch.setattr(server_settings, "llama_server", "/no/such/build")
    with pytest.raises(EngineLoadError, match="its command could not be started"):
        load_engine(SPEC)
    loaded = load_engine(replace(SPEC, slots=1, options={"llama_server": f"{build} --no-slots"}))
    assert ask(loaded, STORY).text
    loaded.close()
    assert noted.read_text().startswith("--no-slots --model ")


@pytest.mark.parametrize(("prompt_cache_mib", "copies"), [(256, True), (64, False)])
def test_prompts_of_idle_slots_are_copied_only_if_the_prompt_cache_holds_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompt_cache_mib: int, copies: bool
) -> None:
    """Else each request waits for copies that displace each other: seconds, with a large model.

    The slots of this one have 8 x 2,048 tokens of 4,608 bytes.
    """
    noted = tmp_path / "environment"
    build = tmp_path / "llama-server"
    name = "LLAMA_ARG_CACHE_IDLE_SLOTS"
    program = f"{sys.executable} -I {llama_server.__file__}"
    build.write_text(f'#!/bin/sh\necho "${name}" > {noted}\nexec {program} "$@"\n')
    build.chmod(0o755)
    options = {"llama_server": str(build), "prompt_cache_mib": prompt_cache_mib}
    load_engine(replace(SPEC, options=options)).close()
    value = noted.read_text().strip()
    assert value == ("1" if copies else "0")  # A build of llama.cpp reads these as on and off.
    monkeypatch.setenv(name, value)
    assert _parameters(SPEC).cache_idle_slots == copies


def test_an_argument_that_a_build_does_not_know_is_refused_at_load() -> None:
    build = f"{sys.executable} -I {llama_server.__file__} --unheard-of"
    with pytest.raises(EngineLoadError, match="it ended with exit status 2"):
        load_engine(replace(SPEC, options={"llama_server": build}))


def test_a_command_whose_quotes_do_not_close_is_told_with_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(EngineLoadError, match="'llama_server' cannot be read: No closing quot"):
        load_engine(replace(SPEC, options={"llama_server": "'"}))
    monkeypatch.setattr(server_settings, "llama_server", "'")
    with pytest.raises(EngineLoadError, match="LLAMA_SERVER cannot be read: No closing quotation"):
        load_engine(SPEC)


def test_a_server_whose_port_was_taken_meanwhile_is_started_at_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        ports = iter((other.getsockname()[1], free_port()))
        monkeypatch.setattr(own_server, "free_port", lambda: next(ports))
        loaded = load_engine(replace(SPEC, slots=1))
    assert ask(loaded, STORY).text
    loaded.close()


def test_a_build_that_ends_at_a_grammar_of_llguidance_is_started_again_without() -> None:
    program = Path(__file__).with_name("build_without_llguidance.py")
    build = f"env PYTHONPATH={ROOT} {sys.executable} {program}"
    options = {**SPEC.options, "llama_server": build}
    loaded = load_engine(replace(SPEC, slots=1, options=options))
    try:
        assert ask(loaded, "What is the capital of Japan?").text
    finally:
        loaded.close()
