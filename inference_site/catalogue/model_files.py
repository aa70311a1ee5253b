"""The files of a model: which there are, and what is wrong with them, without loading one."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from inference_site.catalogue.engines.registry import LIBRARIES
from inference_site.catalogue.gguf_header import check_whole
from inference_site.catalogue.operator_settings import WEIGHTS
from inference_site.domain.model_spec import ModelSpec

_MODELS = ("draft_model",)
"""Options that name the file of another model."""
_PART = re.compile(r"-(\d{1,9})-of-(\d{1,9})$")
_MOST_PARTS = 1000
"""A name with a larger number is that of a file which is whole: each part takes memory and time."""
_MAGIC = b"GGUF"
_GGML_MAGICS = (b"lmgg", b"fmgg", b"tjgg", b"ccgg")
"""Of GGML, GGMF, GGJT and GGCC files: each is a number, whose lowest byte comes first."""
MAGIC_BYTES = 4
_LONGEST_NAME, _LONGEST_PATH = 255, 4000
"""Bytes. Linux refuses to look for what is longer."""


def _part(path: Path) -> re.Match[str] | None:
    """Return the number and the count in the name of a part of a split file."""
    found = _PART.search(path.stem)
    is_part = found is not None and 1 <= int(found[1]) <= int(found[2]) <= _MOST_PARTS
    return found if is_part else None


def is_later_part(path: Path) -> bool:
    """Return whether it is a part of a split file, and not the first."""
    found = _part(path)
    return found is not None and int(found[1]) > 1


def parts_of(path: Path) -> list[Path]:
    """Return all parts of a split file by its first; other files have one."""
    found = _part(path)
    if found is None:
        return [path]
    number, count = found[1], int(found[2])
    stem = path.stem[: found.start()]
    names = (f"{stem}-{n:0{len(number)}}-of-{found[2]}" for n in range(1, count + 1))
    return [path.with_name(f"{name}{path.suffix}") for name in names]


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
