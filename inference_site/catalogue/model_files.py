"""The files of a model: their paths, the facts in their headers, and their errors."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, TypedDict

from inference_site.catalogue.engines.registry import LIBRARIES
from inference_site.catalogue.gguf_files import (
    GGUF_MAGIC,
    check_complete,
    gguf_constants,
    metadata,
    parts_of,
)
from inference_site.catalogue.memory import ModelMemory, side_files_of
from inference_site.catalogue.operator_settings import WEIGHTS
from inference_site.core.domain.model_spec import ModelSpec

MAGIC_BYTES = 4
_GGML_MAGICS = (b"lmgg", b"fmgg", b"tjgg", b"ccgg")
"""The magic numbers of GGML, GGMF, GGJT and GGCC files, in little-endian order."""
_MAX_NAME_BYTES, _MAX_PATH_BYTES = 255, 4000
"""Linux refuses longer ones."""


class FileFacts(TypedDict, total=False):
    """The facts of a model's file on console pages; sizes in bytes, ``trained_context`` in tokens.

    ``memory_parts`` is the breakdown of ``memory_bytes`` as a text.
    """

    size_bytes: int
    memory_bytes: int
    memory_parts: str
    architecture: str
    quantisation: str
    trained_context: int


def is_weights(name: str, beginning: bytes) -> bool:
    """Whether the file's name has an ending of weights, and its first bytes the matching magic."""
    ending = PurePosixPath(name).suffix.lower()
    if ending not in WEIGHTS:
        return False
    magics = (GGUF_MAGIC,) if ending == ".gguf" else (GGUF_MAGIC, *_GGML_MAGICS)
    return beginning[:MAGIC_BYTES] in magics


def file_below(folder: Path, name: str, endings: Sequence[str]) -> Path:
    """Return the path of a file named by a user who may not read other files of the host.

    The name is relative to the folder and has one of the endings. Symbolic links are followed;
    their targets must be in the folder, too. The file need not exist: another host may have it.
    Raise ValueError.
    """
    parts = PurePosixPath(name).parts
    path = folder / name
    try:
        is_inside = (
            0 < max(map(len, map(os.fsencode, parts)), default=0) <= _MAX_NAME_BYTES
            and len(os.fsencode(path)) <= _MAX_PATH_BYTES
            and ".." not in parts
            and "\0" not in name
            and not name.startswith("/")
            and path.resolve().is_relative_to(folder.resolve())
        )
    except (OSError, RuntimeError, ValueError):  # An impossible name, or a loop of links.
        is_inside = False
    if not is_inside:
        raise ValueError("it is not in the directory of models: name a file below it, without '..'")
    if not name.lower().endswith(tuple(endings)):
        raise ValueError(f"the name of the file must end in {' or '.join(endings)}")
    return path


def files_of(spec: ModelSpec) -> frozenset[Path]:
    """Return the model's files that discovery would otherwise list as models of their own."""
    draft = spec.options.get("draft_model")
    paths = [spec.file, Path(draft) if draft is not None else None]
    return frozenset(path.parent.resolve() / path.name for path in paths if path is not None)


def model_file_error(spec: ModelSpec) -> str:
    """Return the error of a model's files, or an empty text."""
    if spec.file is None:
        is_needed = spec.engine in LIBRARIES
        return f"the engine {spec.engine} needs a `file`" if is_needed else ""
    files = [*parts_of(spec.file), *side_files_of(spec)]
    is_gguf = spec.engine == "llama_cpp"
    return next((error for path in files if (error := file_error(path, is_gguf))), "")


def is_special(path: Path) -> bool:
    """Whether it is a pipe, a socket or a device: a process that opens one may wait for ever."""
    try:
        mode = path.stat().st_mode
    except OSError:  # It has none of these; who opens it gets the same error.
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def file_error(path: Path, is_gguf: bool = True) -> str:
    """Return the error of a file, or an empty text."""
    if is_special(path):
        return f"{path} is a pipe, a socket or a device"
    try:
        with path.open("rb"):
            pass
        if is_gguf:
            check_complete(path)
    except FileNotFoundError:
        return f"{path} does not exist"
    except OSError as exc:
        return f"{path} cannot be read: {exc.strerror}"
    except ValueError as exc:
        return f"{path}: {exc}"
    return ""


def architecture_of(spec: ModelSpec) -> str | None:
    """Return the architecture by the entry or the file; None if unknown or the file is elsewhere.

    It reads only the first keys of the file, in 30 µs.
    """
    if model_type := spec.options.get("model_type"):
        return str(model_type)
    if spec.file is None:
        return None
    try:
        pairs = metadata(spec.file)
        return next((value for key, value in pairs if key == "general.architecture"), None)
    except (OSError, ValueError):
        return None


def file_facts(spec: ModelSpec) -> FileFacts:
    """Return the facts of the model's file, without those that cannot be read on this host.

    It reads the header, in 0.4 s for a large vocabulary.
    """
    if spec.file is None:
        return {}
    try:
        size = sum(part.stat().st_size for part in parts_of(spec.file))
        if spec.engine != "llama_cpp":
            return {"size_bytes": size}
        model = ModelMemory(spec, spec.file)
        needs = model.needs
    except (OSError, ValueError):
        return {}
    return {
        "size_bytes": size,
        "memory_bytes": needs.total,
        "memory_parts": str(needs),
        "architecture": str(model.metadata.get("general.architecture", "")),
        "quantisation": quantisation_of(model.metadata.get("general.file_type")),
        "trained_context": model.number("context_length"),
    }


def quantisation_of(file_type: Any) -> str:
    """Return the usual name of a GGUF file type, such as Q4_K_M; an empty text if unknown."""
    try:
        name: str = gguf_constants().LlamaFileType(file_type).name
    except ValueError:
        return ""
    return name.removeprefix("MOSTLY_").removeprefix("ALL_")
