"""Discovery: GGUF files that lie in a folder become models without an entry."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from inference_site.catalogue.entry import default_threads
from inference_site.catalogue.gguf_header import model_context
from inference_site.catalogue.memory import fitting_sizes
from inference_site.catalogue.model_files import file_fault, is_later_part, parts_of
from inference_site.catalogue.models_file import site_sampling
from inference_site.domain.model_spec import ModelSpec

logger = logging.getLogger(__name__)

_Seen = tuple[tuple[int, int], ...]


def discover(folder: Path) -> list[ModelSpec]:
    """Return a spec for each model file, in order of their names; the id is the file's name.

    Projectors, adapters, later parts of split files and what cannot be read are left out.
    """
    return list(_specs(_files(folder)))


def id_of(file: Path) -> str:
    """Return the id of the model in a file."""
    return file.stem.lower()


class Folder:
    """A folder in which files appear while the site runs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[Path, _Seen] = {path: _seen(path) for path in _files(path)}
        self._growing: dict[Path, _Seen] = {}

    def appeared(self) -> list[ModelSpec]:
        """Return the models of files that are new since the last call, and whole.

        A file that is still being written is looked at again once it has stayed the same from one
        call to the next.
        """
        found = {path: _seen(path) for path in _files(self._path)}
        new = {path: seen for path, seen in found.items() if self._known.get(path) != seen}
        still = [path for path, seen in new.items() if self._growing.get(path) == seen]
        self._growing = new
        self._known |= {path: new[path] for path in still}
        return list(_specs([path for path in still if _is_whole(path)]))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.gguf") if not is_later_part(path))


def _seen(path: Path) -> _Seen:
    """Return what changes when a file, or a part of it, is written."""
    return tuple(_time_and_size(part) for part in parts_of(path))


def _time_and_size(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:  # It is gone, or not there yet.
        return 0, 0
    return status.st_mtime_ns, status.st_size


def _is_whole(path: Path) -> bool:
    fault = next((fault for part in parts_of(path) if (fault := file_fault(part))), "")
    if fault:
        logger.warning("%s is left out: %s", path, fault)
    return not fault


def _specs(files: list[Path]) -> Iterator[ModelSpec]:
    ids = set()
    for path in files:
        try:
            is_model = model_context(path) is not None
        except (OSError, ValueError) as exc:
            logger.warning("%s is left out: %s", path, exc)
            continue
        if is_model and id_of(path) not in ids:
            ids.add(id_of(path))
            yield _spec(path)


def _spec(path: Path) -> ModelSpec:
    slots, context_length = fitting_sizes(path, None, None, {})
    return ModelSpec(
        id=id_of(path),
        engine="llama_cpp",
        file=path,
        slots=slots,
        context_length=context_length,
        threads=default_threads("llama_cpp"),
        sampling=site_sampling(),
    )
