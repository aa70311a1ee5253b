"""What models on ctransformers may be asked for, and their options."""

from __future__ import annotations

import struct
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator

from inference_site.catalogue.engines.options import ChatOptions, chat_capabilities
from inference_site.catalogue.gguf_files import chat_template
from inference_site.domain.model_spec import ModelSpec

COMPLETES = frozenset(
    {
        *("cache_prompt", "choices", "completions", "grammar", "logprobs", "prompt_logprobs"),
        *("stop_token_ids", "tokens"),
    }
)


_ARCHITECTURES = (
    *("dolly-v2", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gptj"),
    *("llama", "mpt", "replit", "starcoder"),
)


def library_name(model_type: str) -> str:
    """Return what the library makes of the name of an architecture: letters and digits alone."""
    return "".join(filter(str.isalnum, model_type))


def _known_architecture(name: str) -> str:
    if library_name(name) not in map(library_name, _ARCHITECTURES):
        raise ValueError(f"unknown architecture; there are {', '.join(_ARCHITECTURES)}")
    return name


Build = Literal["avx", "avx2", "basic", "cuda", "local", "metal"]
"""Folders of the package: ``local`` is what pip has compiled on the host."""


class CtransformersOptions(ChatOptions):
    """``model_type`` is the architecture of a GGML file; ``lib`` the build of the library.

    A path would be loaded into the process, whatever it is: only names are taken.
    """

    lib: Build | None = None
    model_type: Annotated[str, AfterValidator(_known_architecture)] | None = None


def has_chat(spec: ModelSpec) -> bool:
    """Whether the model has a chat template, by its entry or its file."""
    if "chat_template" in spec.options:
        return True
    return spec.file is not None and _has_template(spec.file)


@cache
def _has_template(path: Path) -> bool:
    return chat_template(path) is not None


def capabilities(spec: ModelSpec) -> frozenset[str]:
    """Return what requests to this model may ask for: chats too, when it has a template."""
    return chat_capabilities(COMPLETES) if has_chat(spec) else COMPLETES


_MAGIC = 0x67676D6C
_NAMING = ("gpt2", "starcoder", "gptbigcode", "gptj", "gptneox", "dollyv2", "mpt", "replit")
"""Architectures whose files begin with a magic number, another size, and the context."""


def ggml_context(file: Path, architecture: str) -> int | None:
    """Return the tokens of the context; None if the file does not say, or cannot be read.

    ``architecture`` is the library's name of it.
    """
    if architecture not in _NAMING:
        return None
    try:
        with file.open("rb") as opened:
            magic, _, context = struct.unpack("<Iii", opened.read(12))
    except (OSError, struct.error):
        return None
    return context if magic == _MAGIC and context > 0 else None
