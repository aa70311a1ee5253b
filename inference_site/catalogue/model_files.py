"""The files of a model: which there are, and what is wrong with them, without loading one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, TypedDict

from inference_site.catalogue.engines.registry import LIBRARIES
from inference_site.catalogue.gguf_files import check_whole, metadata, parts_of
from inference_site.catalogue.memory import ModelMemory
from inference_site.catalogue.operator_settings import WEIGHTS
from inference_site.domain.model_spec import ModelSpec

_MODELS = ("draft_model",)
"""Options that name the file of another model."""
_MAGIC = b"GGUF"
_GGML_MAGICS = (b"lmgg", b"fmgg", b"tjgg", b"ccgg")
"""Of GGML, GGMF, GGJT and GGCC files: each is a number, whose lowest byte comes first."""
MAGIC_BYTES = 4
_LONGEST_NAME, _LONGEST_PATH = 255, 4000
"""Bytes. Linux refuses to look for what is longer."""


def is_weights(name: str, beginning: bytes) -> bool:
    """Return whether a file of this name, which begins so, is one of weights."""
    ending = PurePosixPath(name).suffix.lower()
    if ending not in WEIGHTS:
        return False
    return beginning[:MAGIC_BYTES] in ((_MAGIC,) if ending == ".gguf" else (_MAGIC, *_GGML_MAGICS))


def file_below(folder: Path, name: str, endings: Sequence[str]) -> Path:
    """Return the path of a file that is named by somebody who may not read the host's other files.

    The name is relative to the folder and has one of the endings. Links are followed: where they
    lead must be in the folder, too. The file itself may be on another host only. Raise ValueError.
    """
    parts = PurePosixPath(name).parts
    path = folder / name
    try:
        is_inside = (
            0 < max(map(len, map(os.fsencode, parts)), default=0) <= _LONGEST_NAME
            and len(os.fsencode(path)) <= _LONGEST_PATH
            and ".." not in parts
            and "\0" not in name
            and not name.startswith("/")
            and path.resolve().is_relative_to(folder.resolve())
        )
    except (OSError, RuntimeError, ValueError):  # A name that no file can have, a loop of links.
        is_inside = False
    if not is_inside:
        raise ValueError("it is not in the directory of models: name a file below it, without '..'")
    if not name.lower().endswith(tuple(endings)):
        raise ValueError(f"the name of the file must end in {' or '.join(endings)}")
    return path


def files_of(spec: ModelSpec) -> frozenset[Path]:
    """Return the files that a model is loaded from and that could be models of their own."""
    named = [spec.file, *(Path(spec.options[key]) for key in _MODELS if key in spec.options)]
    return frozenset(path.parent.resolve() / path.name for path in named if path is not None)


def fault_of(spec: ModelSpec) -> str:
    """Return what is wrong with the files of a model, or an empty text."""
    if spec.file is None:
        needs = spec.engine in LIBRARIES
        return f"the engine {spec.engine} needs a `file`" if needs else ""
    others = [*spec.lora_adapters.values(), *map(Path, _projector(spec))]
    is_gguf = spec.engine == "llama_cpp"
    files = [*parts_of(spec.file), *others]
    return next((fault for path in files if (fault := file_fault(path, is_gguf))), "")


def file_fault(path: Path, is_gguf: bool = True) -> str:
    """Return what is wrong with a file, or an empty text."""
    try:
        with path.open("rb"):
            pass
        if is_gguf:
            check_whole(path)
    except FileNotFoundError:
        return f"{path} does not exist"
    except OSError as exc:
        return f"{path} cannot be read: {exc.strerror}"
    except ValueError as exc:
        return f"{path}: {exc}"
    return ""


def _projector(spec: ModelSpec) -> list[str]:
    return [str(spec.options["mmproj"])] if "mmproj" in spec.options else []


def architecture_of(spec: ModelSpec) -> str | None:
    """Return what the entry or the file says; None if neither does, or the file is elsewhere."""
    if told := spec.options.get("model_type"):
        return str(told)
    return None if spec.file is None else _of_file(spec.file)


def _of_file(path: Path) -> str | None:
    """Read no further than its first keys, in 30 µs."""
    try:
        found = (value for key, value in metadata(path) if key == "general.architecture")
        return next(found, None)
    except (OSError, ValueError):
        return None


class FileFacts(TypedDict, total=False):
    """Facts of one file; sizes are in bytes, ``trained_context`` in tokens.

    ``memory_parts`` says what makes up ``memory_bytes``."""

    size_bytes: int
    memory_bytes: int
    memory_parts: str
    architecture: str
    quantisation: str
    trained_context: int


def file_facts(spec: ModelSpec) -> FileFacts:
    """Return what the model's file says, as far as it can be read; nothing without one here.

    It reads the header, in 0.4 s for a large vocabulary.
    """
    if spec.file is None:
        return {}
    try:
        size = sum(part.stat().st_size for part in parts_of(spec.file))
        if spec.engine != "llama_cpp":
            return {"size_bytes": size}
        model = ModelMemory(spec, spec.file)
        found, needs = model.metadata, model.needs
    except (OSError, ValueError):
        return {}
    return {
        "size_bytes": size,
        "memory_bytes": needs.total,
        "memory_parts": str(needs),
        "architecture": str(found.get("general.architecture", "")),
        "quantisation": quantisation_of(found.get("general.file_type")),
        "trained_context": model.number("context_length"),
    }


def quantisation_of(file_type: Any) -> str:
    """Return the name by which files of this type are known, such as Q4_K_M."""
    from gguf.constants import LlamaFileType  # Brings numpy, which few processes use.

    try:
        return LlamaFileType(file_type).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:
        return ""
