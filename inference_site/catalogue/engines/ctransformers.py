"""The options and capabilities of models on ctransformers."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator

from inference_site.catalogue.engines.options import ChatOptions, chat_capabilities
from inference_site.catalogue.gguf_files import cached_until_replaced, chat_template
from inference_site.core.domain.model_spec import ModelSpec

COMPLETION_CAPABILITIES = frozenset(
    {
        *("cache_prompt", "choices", "completions", "grammar", "logprobs", "prompt_logprobs"),
        *("stop_token_ids", "tokens"),
    }
)
_ARCHITECTURES = (
    *("dolly-v2", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gptj"),
    *("llama", "mpt", "replit", "starcoder"),
)
_GGML_MAGIC = 0x67676D6C
_CONTEXT_IN_HEADER = (
    *("gpt2", "starcoder", "gptbigcode", "gptj", "gptneox", "dollyv2", "mpt", "replit"),
)
"""Architectures whose GGML files begin with the magic number, another size, and the context."""

Build = Literal["avx", "avx2", "basic", "cuda", "local", "metal"]
"""Folders of the package; ``local`` is what pip compiled on the host."""


def normalized_model_type(model_type: str) -> str:
    """Return the library's form of the name of an architecture: letters and digits only."""
    return "".join(filter(str.isalnum, model_type))


def _check_architecture(name: str) -> str:
    if normalized_model_type(name) not in map(normalized_model_type, _ARCHITECTURES):
        raise ValueError(f"unknown architecture; there are {', '.join(_ARCHITECTURES)}")
    return name


class CtransformersOptions(ChatOptions):
    """``model_type`` is the architecture of a GGML file; ``lib`` the build of the library.

    The library would load any path given as ``lib`` into the process, so only names are accepted.
    """

    lib: Build | None = None
    model_type: Annotated[str, AfterValidator(_check_architecture)] | None = None


def has_chat(spec: ModelSpec) -> bool:
    """Whether the model's entry or its file has a chat template."""
    if "chat_template" in spec.options:
        return True
    return spec.file is not None and _has_template(spec.file)


@cached_until_replaced
def _has_template(path: Path) -> bool:
    return chat_template(path) is not None


def capabilities(spec: ModelSpec) -> frozenset[str]:
    """Return the capabilities of this model; a model with a template can chat, too."""
    return chat_capabilities(COMPLETION_CAPABILITIES) if has_chat(spec) else COMPLETION_CAPABILITIES


def ggml_context(file: Path, model_type: str) -> int | None:
    """Return the context length in a GGML file of 2023, which its model cannot exceed.

    None if the format of this architecture does not store it, or the file cannot be read.
    """
    if normalized_model_type(model_type) not in _CONTEXT_IN_HEADER:
        return None
    try:
        with file.open("rb") as opened:
            magic, _, context = struct.unpack("<Iii", opened.read(12))
    except (OSError, struct.error):
        return None
    return context if magic == _GGML_MAGIC and context > 0 else None
