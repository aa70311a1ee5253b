"""The options and capabilities of models on llama.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    ValidationInfo,
    field_validator,
)

from inference_site.catalogue.engines.options import ChatOptions
from inference_site.catalogue.gguf_files import TOKENS, cached_until_replaced, fields
from inference_site.catalogue.operator_settings import GgufFile, Text
from inference_site.core.domain.model_spec import ModelSpec

PREFILL_BATCH = 2048
"""Tokens of prompts that one step reads, of all slots together: fewer let the engine see a
cancellation sooner, and have the prompts that arrive together wait for each other."""

PREFILL_UBATCH = 512
"""Tokens that are computed together; llama.cpp's own default."""

PROMPT_CACHE_MIB = 256
"""Host memory for prompts that lost their slot; llama.cpp itself would take 8 GiB."""

_GENERATES = frozenset(
    {
        *("chat", "completions", "render", "tokens"),
        *("cache_prompt", "chat_template", "choices", "grammar", "logprobs", "response_prefix"),
        *("mirostat", "prompt_logprobs", "prompt_template", "stop_token_ids", "token_ids", "tools"),
        *("allowed_token_ids", "bad_words"),
    }
)


_REPOSITORY, _OTHER_FILE, _THIS_FILE = "myproject", "tmp", "filename"
"""Names in llama-server where a request has none."""
_SNIPPET = "\n\n--- snippet ---\n\n"


@dataclass(frozen=True, slots=True)
class FillInMarks:
    """The tokens before the prefix, the suffix and the middle of a text to be filled in.

    ``suffix_first``: the suffix comes before the prefix, which the middle then continues.
    ``repository`` and ``file`` are the tokens before the names of these, for models that know them.
    """

    prefix: str
    suffix: str
    middle: str = ""
    suffix_first: bool = False
    repository: str = ""
    file: str = ""

    def around(self, prefix: str, suffix: str, files: Sequence[tuple[str, str]] = ()) -> str:
        """Return the prompt that is continued by what fits between the two.

        ``files`` are names and texts, which come first in the form of llama-server.
        """
        before, after = f"{self.prefix}{prefix}", f"{self.suffix}{suffix}"
        parts = (after, before) if self.suffix_first else (before, after)
        return f"{self._files(files) if files else ''}{''.join(parts)}{self.middle}"

    def _files(self, files: Sequence[tuple[str, str]]) -> str:
        if not self.file:
            return "".join(f"{_SNIPPET}{text}" for _, text in files)
        repository = f"{self.repository}{_REPOSITORY}\n" if self.repository else ""
        named = (f"{self.file}{name or _OTHER_FILE}\n{text}" for name, text in files)
        return f"{repository}{''.join(named)}{self.file}{_THIS_FILE}\n"


_FAMILIES = (
    FillInMarks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    FillInMarks("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    FillInMarks("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    FillInMarks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    FillInMarks("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    FillInMarks("<|prefix|>", "<|suffix|>", "<|middle|>"),  # Falcon-H1-Tiny-Coder
    FillInMarks("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    FillInMarks("<PRE>", "<SUF>", "<MID>"),
    FillInMarks("[PREFIX]", "[SUFFIX]", suffix_first=True),  # Codestral
)
"""The marks of families of models. Codestral's are Mistral's; the others are llama.cpp's list."""
_MARK_IDS = (
    ("tokenizer.ggml.fim_pre_token_id", "tokenizer.ggml.prefix_token_id"),
    ("tokenizer.ggml.fim_suf_token_id", "tokenizer.ggml.suffix_token_id"),
    ("tokenizer.ggml.fim_mid_token_id", "tokenizer.ggml.middle_token_id"),
)
"""Keys of a file that name the tokens of its marks; the second of each is that of older files."""
_REPOSITORY_MARKS = ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>")
_FILE_MARKS = ("<|file_sep|>",)
_OF_FILES = ("tokenizer.ggml.fim_rep_token_id", "tokenizer.ggml.fim_sep_token_id")
"""The marks of several files: llama.cpp's lists, and the keys of a file that names them."""

CacheType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]
_WHOLE = ("f32", "f16", "bf16")
PositiveFloat = Annotated[float, Field(gt=0)]


class Tuning(ChatOptions):
    """Options of llama.cpp of the same names; None means llama.cpp's default.

    See docs/engines.md. ``flash_attn`` is a boolean or "auto"; ``tensor_split`` has a share for
    each GPU. ``draft_model`` is the GGUF file of a smaller model of the same vocabulary, whose
    tokens the model only checks.
    """

    cache_type_k: CacheType | None = None
    cache_type_v: CacheType | None = None
    flash_attn: bool | Literal["auto"] = "auto"
    n_batch: PositiveInt | None = None
    n_ubatch: PositiveInt | None = None
    rope_scaling: Literal["none", "linear", "yarn", "longrope"] | None = None
    rope_freq_base: PositiveFloat | None = None
    rope_freq_scale: PositiveFloat | None = None
    yarn_orig_ctx: PositiveInt | None = None
    split_mode: Literal["none", "layer", "row"] | None = None
    main_gpu: NonNegativeInt | None = None
    tensor_split: Annotated[list[NonNegativeFloat], Field(min_length=1, max_length=16)] | None = (
        None
    )
    mlock: bool = False
    numa: Literal["distribute", "isolate", "numactl"] | None = None
    draft_model: GgufFile | None = None
    draft_max: PositiveInt | None = None
    draft_min: NonNegativeInt | None = None
    draft_p_min: Annotated[float, Field(ge=0, le=1)] | None = None
    draft_gpu_layers: Annotated[int, Field(ge=-1)] | None = None

    @field_validator("flash_attn")
    @classmethod
    def _serves_the_cache(cls, value: bool | str, info: ValidationInfo) -> bool | str:
        kind = info.data.get("cache_type_v")
        if value is False and kind is not None and kind not in _WHOLE:
            raise ValueError(f"cannot be off with 'cache_type_v' {kind}")
        return value

    @field_validator("n_ubatch")
    @classmethod
    def _fits_the_batch(cls, value: int, info: ValidationInfo) -> int:
        if value > (batch := info.data.get("n_batch") or PREFILL_BATCH):
            raise ValueError(f"cannot be more than 'n_batch', {batch}")
        return value

    @field_validator("tensor_split")
    @classmethod
    def _has_a_share(cls, value: list[float]) -> list[float]:
        if not any(value):
            raise ValueError("needs a share above 0")
        return value

    @field_validator("draft_max", "draft_min", "draft_p_min", "draft_gpu_layers")
    @classmethod
    def _need_a_draft(cls, value: float, info: ValidationInfo) -> float:
        if info.data.get("draft_model") is None:
            raise ValueError("needs a smaller model, 'draft_model'")
        return value


class LlamaCppOptions(Tuning):
    """The options of models on llama.cpp, besides those of all engines.

    ``embedding`` is how tokens are pooled, and makes it a model for embeddings only, which may be
    shortened if it is a ``matryoshka``; with ``rank`` it is a model that only ranks documents.
    ``fim_tokens`` mark what is before, after and in the middle for a completion with a suffix,
    where the file has no marks of a known family. ``mmproj`` is the GGUF file of a projector, for
    the ``modalities``. ``prompt_cache_mib`` is host memory for prompts that lost their slot.
    ``llama_server`` is the command of another build of the server of llama.cpp.
    """

    embedding: Literal["mean", "cls", "last", "rank"] | None = None
    fim_tokens: Annotated[tuple[str, str, str], Field(strict=False)] | None = None
    llama_server: Text | None = None
    matryoshka: bool = False
    mmproj: GgufFile | None = None
    modalities: list[Literal["vision", "audio"]] = ["vision"]
    prompt_cache_mib: NonNegativeInt = PROMPT_CACHE_MIB

    @field_validator("embedding")
    @classmethod
    def _sets_the_batch(cls, value: str, info: ValidationInfo) -> str:
        for name in ("n_batch", "n_ubatch", "draft_model"):
            if info.data.get(name) is not None:
                raise ValueError(f"cannot be used together with '{name}'")
        return value

    @field_validator("modalities")
    @classmethod
    def _need_projector(cls, value: list[str], info: ValidationInfo) -> list[str]:
        if value and info.data.get("mmproj") is None:
            raise ValueError("needs a projector, 'mmproj'")
        return value


def modalities(spec: ModelSpec) -> frozenset[str]:
    """Return the inputs besides text that the model's projector accepts, images by default."""
    if "mmproj" not in spec.options:
        return frozenset()
    return frozenset(spec.options.get("modalities", ["vision"]))


def marks(spec: ModelSpec) -> FillInMarks | None:
    """Return the marks of a text to be filled in: the entry's, or those of the file."""
    if given := spec.options.get("fim_tokens"):
        return FillInMarks(*given)
    return _marks_of(spec.file) if spec.file else None


@cached_until_replaced
def _marks_of(path: Path) -> FillInMarks | None:
    """Return the marks that a file names by their ids, else those of a family that it has."""
    found = fields(path, TOKENS, *chain.from_iterable(_MARK_IDS), *_OF_FILES)
    tokens = found.get(TOKENS, ())
    known = frozenset(("", *tokens))

    def named(*keys: str) -> str:
        id_ = next((found[key] for key in keys if key in found), -1)
        return tokens[id_] if 0 <= id_ < len(tokens) else ""

    prefix, suffix, middle = (named(*keys) for keys in _MARK_IDS)
    if prefix and suffix and middle:
        found_marks = FillInMarks(prefix, suffix, middle)
    else:
        families = (m for m in _FAMILIES if known.issuperset((m.prefix, m.suffix, m.middle)))
        if (family := next(families, None)) is None:
            return None
        found_marks = family
    repository, file = map(named, _OF_FILES)
    return replace(
        found_marks,
        repository=repository or next(filter(known.__contains__, _REPOSITORY_MARKS), ""),
        file=file or next(filter(known.__contains__, _FILE_MARKS), ""),
    )


def capabilities(spec: ModelSpec) -> frozenset[str]:
    """Return the capabilities that requests to this model may use."""
    if spec.options.get("embedding") == "rank":
        return frozenset({"rerank", "tokens"})
    if "embedding" in spec.options:
        shortened = {"dimensions"} if spec.options.get("matryoshka") else set()
        return frozenset({"embeddings", "tokens", *shortened})
    optional = {"suffix": marks(spec) is not None, "lora": bool(spec.lora_adapters)}
    return _GENERATES | modalities(spec) | {name for name, has in optional.items() if has}
