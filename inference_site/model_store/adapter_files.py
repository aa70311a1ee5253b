"""The file of a LoRA adapter, as an operator names it: where it lies, and whether it is one."""

from __future__ import annotations

from pathlib import Path

from django.conf import settings

from inference_site.catalogue.architectures import architecture_of
from inference_site.catalogue.gguf_header import metadata
from inference_site.catalogue.model_files import file_below, file_fault
from inference_site.domain.model_spec import ModelSpec


def adapter_file(given: str, spec: ModelSpec) -> str:
    """Return the path of an adapter for this model, from ``MODELS_DIR`` on.

    Raise ValueError for a path outside of it, and for what is no adapter or another model's.
    """
    folder = Path(settings.MODELS_DIR)
    try:
        path = file_below(folder, given, (".gguf",))
    except ValueError as exc:
        raise ValueError(f"{exc}.") from exc
    if not path.is_file():
        raise ValueError(f"there is no file '{given[:200]}' in MODELS_DIR.")
    if fault := file_fault(path):
        raise ValueError(f"{fault.replace(str(path), given)}.")
    try:
        said = dict(metadata(path))
    except (OSError, ValueError) as exc:
        raise ValueError(f"{exc}.") from exc
    wanted = architecture_of(spec)
    if said.get("general.type") != "adapter" or said.get("adapter.type") != "lora":
        raise ValueError(f"'{given[:200]}' is not a LoRA adapter.")
    if wanted and said.get("general.architecture") != wanted:
        own = said.get("general.architecture")
        raise ValueError(f"it is for models of the architecture {own}, not {wanted}.")
    return path.relative_to(folder).as_posix()
