"""The files of a model: which there are, and what is wrong with them, without loading one."""

from __future__ import annotations

import re
from pathlib import Path

from inference_site.catalogue.engines.registry import LIBRARIES
from inference_site.catalogue.gguf_header import check_whole
from inference_site.domain.model_spec import ModelSpec

_MODELS = ("draft_model",)
"""Options that name the file of another model."""
_PART = re.compile(r"-(\d+)-of-(\d+)$")


def is_later_part(path: Path) -> bool:
    """Return whether it is a part of a split file, and not the first."""
    found = _PART.search(path.stem)
    return found is not None and int(found[1]) > 1


def parts_of(path: Path) -> list[Path]:
    """Return all parts of a split file by its first; other files have one."""
    found = _PART.search(path.stem)
    if found is None:
        return [path]
    number, count = found[1], int(found[2])
    stem = path.stem[: found.start()]
    names = (f"{stem}-{n:0{len(number)}}-of-{found[2]}" for n in range(1, count + 1))
    return [path.with_name(f"{name}{path.suffix}") for name in names]


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
