"""Every architecture of 2023 that ctransformers loads: a tiny file of each, and what it must do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_int
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from inference_site.catalogue.engines.ctransformers import normalized_model_type
from inference_site.core.domain.deltas import TextDelta, TokensDelta
from inference_site.core.domain.errors import ContextLengthExceeded, EngineLoadError
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.request import Constraint, GenerationRequest, Sampling
from tests.sinks import RecordingSink
from tests.tiny_ggml import ARCHITECTURES, CONTEXT, write_ggml
from worker.engines.base import Engine, load_engine
from worker.engines.ctransformers.engine import open_model
from worker.engines.ctransformers.vocabulary import own_tokenizer, read_ggml

pytestmark = pytest.mark.slow  # It generates with weights.

HELLO = GenerationRequest(
    "m",
    operation="complete",
    prompts=("Hello the naïve 🦊",),
    sampling=Sampling(temperature=0, seed=1),
    max_output_tokens=8,
    ignore_eos=True,
)
TEXTS = [
    *("", " ", "a", "Hello  the\n\n thet", "naïve 🦊", "it's 42% 'll\t", " " * 40),
    *("x<|end|>y### End of", "\u2581 ▁a", "\n \n"),
]


def spec_of(architecture: str, folder: Path) -> ModelSpec:
    """Write a file of the architecture, and return the entry of its model."""
    path = write_ggml(folder / "tiny.bin", architecture)
    options = {"model_type": architecture}
    return ModelSpec("m", "ctransformers", path, 2, CONTEXT, threads=1, options=options)


@pytest.fixture(scope="module", params=["llama", "gptj", "mpt"])
def spec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """A file of one architecture of each of the three kinds of vocabulary."""
    return spec_of(request.param, tmp_path_factory.mktemp("ggml"))


@pytest.fixture(scope="module")
def engine(spec: ModelSpec) -> Iterator[Engine]:
    loaded = load_engine(spec)
    yield loaded
    loaded.close()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_completes_to_the_end_of_its_context(
    tmp_path: Path, architecture: str
) -> None:
    loaded = open_model(spec_of(architecture, tmp_path))  # Each server would take seconds.
    sink = complete(loaded, max_output_tokens=None)
    loaded.close()
    assert sink.finishes == ["length"]
    assert sink.usage.input_tokens + sink.usage.output_tokens == CONTEXT


def complete(engine: Engine, **fields: Any) -> RecordingSink:
    """Run it to the end."""
    sink = RecordingSink()
    engine.run(replace(HELLO, **fields), sink)
    return sink


def tokens(engine: Engine, text: str) -> tuple[int, ...]:
    """The tokens of a text."""
    sink = RecordingSink()
    engine.run(replace(HELLO, operation="tokenize", prompts=(text,)), sink)
    return next(delta.ids for delta in sink.deltas if isinstance(delta, TokensDelta))


def test_it_completes_the_same_whether_the_prompt_was_read_before_or_not(engine: Engine) -> None:
    first = complete(engine, cache_prompt=False, top_logprobs=2)
    again = complete(engine)
    assert first.finishes == again.finishes == ["length"]
    assert first.usage.output_tokens == 8
    assert again.text == first.text
    other = complete(engine, prompts=("Hello the fox",))
    assert other.text == complete(engine, prompts=("Hello the fox",), cache_prompt=False).text
    entries = [e for delta in first.deltas if isinstance(delta, TextDelta) for e in delta.logprobs]
    assert all(np.isfinite(entry.logprob) for entry in entries)


def test_texts_are_tokens_and_tokens_are_texts(engine: Engine, spec: ModelSpec) -> None:
    text = "Hello the naïve 🦊  x"
    sink = RecordingSink()
    ids = tokens(engine, text)
    engine.run(replace(HELLO, operation="detokenize", prompts=(ids,)), sink)
    assert sink.text.removeprefix("<s>") == text


def test_what_is_no_prompt_to_the_library_is_one_here(engine: Engine) -> None:
    assert complete(engine, prompts=("",)).finishes == ["length"]
    with pytest.raises(ContextLengthExceeded):  # One word: the library's own would recurse.
        complete(engine, prompts=("a" * 100_000,))


def test_copies_of_a_model_compute_one_after_the_other(engine: Engine) -> None:
    """The library has one buffer for all of them; two at once would write over each other."""
    prompts = ("Hello the naïve 🦊", "What the fox says, t")
    alone = [complete(engine, prompts=(p,), max_output_tokens=30).text for p in prompts]
    together = threading.Barrier(2, timeout=10)

    def run(prompt: str) -> list[str]:
        together.wait()
        fields: dict[str, Any] = {"cache_prompt": False, "max_output_tokens": 30}
        return [complete(engine, prompts=(prompt,), **fields).text for _ in range(4)]

    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(run, prompts))
    assert answers == [[text] * 4 for text in alone]


def test_schema_leaves_no_room_for_endless_white_space(engine: Engine) -> None:
    schema = '{"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}'
    closed = schema[:-1] + ', "additionalProperties": false}'
    bound = Constraint("json_schema", closed, "response_format")
    for seed in range(3):
        sampling = Sampling(temperature=2, top_k=0, top_p=1, seed=seed)
        sink = complete(engine, constraint=bound, sampling=sampling, max_output_tokens=40)
        assert sink.text in ('{"n": 1}', '{"n": 2}')
        assert sink.finishes == ["stop"]


def test_the_end_of_a_text_is_the_token_of_that_name(engine: Engine, spec: ModelSpec) -> None:
    assert spec.file is not None
    end = (
        read_ggml(spec.file, normalized_model_type(spec.options["model_type"])).end or 2
    )  # Llama's.
    forced = Sampling(temperature=0, logit_bias=((end, 1000.0),))
    sink = complete(engine, sampling=forced, ignore_eos=False)
    assert (sink.text, sink.finishes, sink.usage.output_tokens) == ("", ["stop"], 1)


def test_own_tokenizers_do_what_the_librarys_do(spec: ModelSpec) -> None:
    from ctransformers.llm import LLM, Config

    assert spec.file is not None
    own = own_tokenizer(read_ggml(spec.file, normalized_model_type(spec.options["model_type"])))
    if own is None:
        pytest.skip("the library's own is used")
    config = Config(context_length=CONTEXT, threads=1)
    llm = LLM(
        str(spec.file),
        normalized_model_type(spec.options["model_type"]),
        config=config,
        lib="basic",
    )
    for text in filter(None, TEXTS):
        room = (c_int * 1000)()
        count = llm.ctransformers_llm_tokenize(text.encode(), False, room)
        assert own(text.encode()) == list(room[:count]), repr(text)


@pytest.mark.parametrize(
    ("left", "told"), [(3, "ends too early"), (500, "ends too early"), (-100, "ends within")]
)
def test_file_that_was_cut_off_is_refused(
    spec: ModelSpec, tmp_path: Path, left: int, told: str
) -> None:
    assert spec.file is not None
    cut = tmp_path / "cut.bin"
    cut.write_bytes(spec.file.read_bytes()[:left])
    with pytest.raises(EngineLoadError, match=told) as caught:
        open_model(replace(spec, file=cut))  # As the model's server does.
    assert str(cut) in str(caught.value)


def test_file_of_another_architecture_is_refused(spec: ModelSpec) -> None:
    other = "mpt" if spec.options["model_type"] != "mpt" else "gptj"
    with pytest.raises(EngineLoadError, match=f"as {other}: "):
        open_model(replace(spec, options={"model_type": other}))


def test_vocabulary_that_would_end_the_process_is_refused(tmp_path: Path) -> None:
    path = write_ggml(tmp_path / "mpt.bin", "mpt")
    damaged = path.read_bytes().replace(b"\x02\x00\x00\x00He", b"\x02\x00\x00\x00H\xff")
    path.write_bytes(damaged)
    spec = ModelSpec("m", "ctransformers", path, options={"model_type": "mpt"})
    with pytest.raises(EngineLoadError, match="token 255 is not UTF-8"):
        open_model(spec)


@pytest.mark.parametrize("vocabulary", ["llama", "gpt2"])
def test_every_token_of_a_text_has_room(tmp_path: Path, vocabulary: str) -> None:
    """Without a token for SentencePiece's mark, a space is three tokens."""
    path = tmp_path / "bytes.gguf"
    write_bytes_model(path, vocabulary)
    spec = ModelSpec("m", "ctransformers", path, 1, CONTEXT, threads=1)
    if vocabulary != "llama":
        with pytest.raises(EngineLoadError, match=r"of the kind 'gpt2'; the engine llama_cpp"):
            open_model(spec)
        return
    engine = open_model(spec)
    assert len(tokens(engine, " " * 80)) == 1 + 3 * 81
    engine.close()


def write_bytes_model(path: Path, vocabulary: str) -> None:
    """Write a GGUF model of llama's architecture whose tokens are the bytes alone."""
    words = [b"<unk>", b"<s>", b"</s>", *(f"<0x{value:02X}>".encode() for value in range(256))]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(vocabulary)
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * len(words))
    writer.add_token_types([2, 3, 3, *[6] * 256])
    writer.add_token_merges([])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(32)
    random = np.random.default_rng(1)
    squares = [f"blk.0.{part}" for part in ("attn_q", "attn_k", "attn_v", "attn_output")]
    squares += [f"blk.0.{part}" for part in ("ffn_gate", "ffn_up", "ffn_down")]
    shapes = dict.fromkeys((f"{name}.weight" for name in squares), (64, 64))
    shapes |= dict.fromkeys(("token_embd.weight", "output.weight"), (len(words), 64))
    for name, shape in shapes.items():
        writer.add_tensor(name, random.normal(0, 0.3, shape).astype(np.float32))
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
