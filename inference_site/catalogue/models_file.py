"""Reading the models file: entries become model specs; errors point at file, line and key.

docs/models.example.yaml shows every key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import yaml
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from pydantic import AfterValidator, Field, PositiveInt, ValidationInfo, field_validator

from inference_site.catalogue.engines.ctransformers import ggml_context, library_name
from inference_site.catalogue.engines.registry import ENGINES
from inference_site.catalogue.memory import fitting_sizes
from inference_site.catalogue.operator_settings import (
    BadKey,
    GgufFile,
    Locate,
    Names,
    OperatorSettings,
    WeightsFile,
)
from inference_site.catalogue.routes import Route, read_route
from inference_site.catalogue.sampler_fields import SamplerDefaults
from inference_site.domain.addresses import AllowedAddresses
from inference_site.domain.model_spec import HIGHEST_PRICE, ModelSpec, Price
from inference_site.domain.sampling import Sampling
from inference_site.host import physical_cores, usable_cores

Key = tuple[str, ...]

_LOADER: type[yaml.SafeLoader | yaml.CSafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The one in C is ten times as fast; not every build of PyYAML has it."""


def site_sampling() -> Sampling:
    """Return what requests and models leave out. Raise ImproperlyConfigured for a bad setting."""
    try:
        return SamplerDefaults.read(settings.SAMPLING).to_defaults()
    except BadKey as exc:
        raise ImproperlyConfigured(f"{'.'.join(('SAMPLING', *exc.path))}: {exc}.") from exc


def read_models_file(path: Path) -> list[ModelSpec]:
    """Return the models, in order. Raise ImproperlyConfigured with file, line and key."""
    return read_models_and_routes(path)[0]


def read_models_and_routes(path: Path) -> tuple[list[ModelSpec], list[Route]]:
    """Return the entries, in order. Raise ImproperlyConfigured with file, line and key."""
    try:
        text = path.read_text(encoding="utf-8")
        lines: dict[Key, int] = {}
        document = yaml.load(text, _LOADER)  # noqa: S506  # Both loaders are safe.
        _note_lines(yaml.compose(text, _LOADER), lines, _above(document))
        return _entries(document, partial(_located, path.parent))
    except yaml.MarkedYAMLError as exc:
        line = exc.problem_mark.line + 1 if exc.problem_mark else 1
        raise ImproperlyConfigured(f"{path}:{line}: is not YAML: {exc.problem}.") from exc
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as exc:
        raise ImproperlyConfigured(f"{path}: cannot be read: {exc}") from exc
    except BadKey as exc:
        prefixes = (exc.path[:length] for length in range(len(exc.path), 0, -1))
        line = next((lines[key] for key in prefixes if key in lines), 1)
        raise ImproperlyConfigured(f"{path}:{line}: {'.'.join(exc.path)}: {exc}.") from exc


def entry_lines(path: Path) -> dict[str, int]:
    """Return the line of each model's file, or else of its entry, in a good models file."""
    text, lines = path.read_text(encoding="utf-8"), dict[Key, int]()
    document = yaml.load(text, _LOADER)  # noqa: S506  # Both loaders are safe.
    _note_lines(yaml.compose(text, _LOADER), lines, _above(document))
    ids = [key[1] for key in lines if len(key) == 2]
    return {id_: lines.get(("models", id_, "file"), lines["models", id_]) for id_ in ids}


def _located(folder: Path, file: str, _endings: Sequence[str]) -> str:
    """Return where a model's file lies: ``hf:owner/name/file`` is where ``manage.py pull`` puts it.

    Other paths are read from the folder of the models file. They may lead anywhere: the owner of
    the host writes the models file.
    """
    if file.startswith("hf:"):
        return str(Path(settings.MODELS_DIR) / file.removeprefix("hf:"))
    return str(folder / file)


def _above(document: Any) -> Key:
    """Return where the keys of a document belong: one of names and files alone is all models."""
    is_short = isinstance(document, dict) and "models" not in document
    return ("models",) if is_short and all(isinstance(v, str) for v in document.values()) else ()


def _note_lines(node: yaml.Node | None, lines: dict[Key, int], parent: Key = ()) -> None:
    """Note the line of each key. Raise BadKey for one that is there twice."""
    if not isinstance(node, yaml.MappingNode):
        return
    seen = set()
    for name, value in node.value:
        key = (*parent, str(name.value))
        lines[key] = name.start_mark.line + 1
        if key in seen:
            raise BadKey(key, "it is there twice")
        seen.add(key)
        _note_lines(value, lines, key)


def _entries(document: Any, locate: Locate) -> tuple[list[ModelSpec], list[Route]]:
    document = {"models": document} if _above(document) else document
    given = document.get("models") if isinstance(document, dict) else None
    if not isinstance(given, dict) or not given:
        raise BadKey(("models",), "must map model ids to their settings")
    if unknown := document.keys() - {"models"}:
        raise BadKey((str(min(unknown, key=str)),), "unknown key")
    entries: dict[str, dict[str, Any]] = {}
    for id_, value in given.items():
        entry = {"file": value} if isinstance(value, str) else value
        if not isinstance(entry, dict):
            raise BadKey(("models", str(id_)), "must be a mapping, or the name of a file")
        entries[str(id_)] = {str(name): value for name, value in entry.items()}
    specs, routes = {}, []
    for id_, entry in entries.items():
        if "route" not in entry:
            with _below("models", id_):
                specs[id_] = read_entry(id_, entry, locate)
    for id_, entry in entries.items():
        if "route" in entry:
            with _below("models", id_):
                routes.append(read_route(id_, entry, specs, entries))
    return list(specs.values()), routes


@contextmanager
def _below(*key: str) -> Iterator[None]:
    """Have a BadKey say where it is in the file."""
    try:
        yield
    except BadKey as exc:
        raise BadKey((*key, *exc.path), str(exc)) from exc


def read_entry(
    id_: str, entry: dict[str, Any], locate: Locate, allowed: AllowedAddresses | None = None
) -> ModelSpec:
    """Return the spec of an entry; ``locate`` makes paths of names of files.

    ``allowed`` are the addresses at which its servers may be, None for any. Raise BadKey.
    """
    given = dict(entry)
    common = {name: given.pop(name) for name in entry if name in Entry.model_fields}
    known = Entry.read(common, locate)
    options = _options(known.engine, given, locate)
    slots, context_length = known.sizes(options)
    return ModelSpec(
        id=id_,
        engine=known.engine,
        file=Path(known.file) if known.file else None,
        slots=slots,
        context_length=context_length,
        threads=known.threads or default_threads(known.engine),
        gpu_layers=known.gpu_layers,
        aliases=known.aliases,
        is_listed=known.listed,
        projects=known.projects,
        price=known.price.to_price(),
        lora_adapters={name: Path(file) for name, file in known.lora_adapters.items()},
        sampling=known.sampling.to_defaults().over(site_sampling()),
        is_preloaded=known.preload,
        replicas=known.replicas,
        hosts=known.hosts,
        keep_alive_s=known.keep_alive,
        min_resident_s=known.min_resident,
        is_pinned=known.pinned,
        exclusive_with=known.exclusive_with,
        forced_sampling=known.forced_sampling.to_defaults(),
        allowed_addresses=allowed if known.engine == "openai_upstream" else None,
        options=options,
    )


def _options(engine: str, given: dict[str, Any], locate: Locate) -> dict[str, Any]:
    """Return what only the engine understands: checked, and with the paths of files."""
    model = ENGINES[engine].options
    if unknown := given.keys() - model.model_fields.keys():
        _refuse(engine, min(unknown))
    return model.read(given, locate).model_dump(exclude_unset=True)


def _refuse(engine: str, key: str) -> NoReturn:
    """Raise BadKey for an unknown key; for an option of other engines, name them."""
    takers = [name for name in ENGINES if key in ENGINES[name].options.model_fields]
    if not takers:
        raise BadKey((key,), "unknown key")
    raise BadKey((key,), f"{engine} takes no such option; {' and '.join(takers)} would")


_DEFAULT = ModelSpec(id="", engine="llama_cpp")


def default_threads(engine: str) -> int:
    """Return the threads of a model on this host: all physical cores for llama.cpp.

    Its threads sleep soon after they have begun to wait for each other (``GOMP_SPINCOUNT``). Those
    of ctransformers never do, and one that lacks a core stalls the others: it gets half the cores.
    """
    return physical_cores() if engine == _DEFAULT.engine else max(1, int(usable_cores()) // 2)


_Amount = Annotated[float, Field(ge=0, le=HIGHEST_PRICE)]


class PriceEntry(OperatorSettings):
    """What a million tokens cost; cached ones cost as much as others unless it says otherwise."""

    input: _Amount = 0.0
    cached: _Amount | None = None
    output: _Amount = 0.0

    def to_price(self) -> Price:
        """Return the domain's value."""
        cached = self.input if self.cached is None else self.cached
        return Price(input=self.input, cached=cached, output=self.output)


def _known_engine(name: str) -> str:
    if name not in ENGINES:
        raise ValueError(f"unknown engine {name!r}; there are {', '.join(ENGINES)}")
    return name


class Entry(OperatorSettings):
    """The settings of a model; its meaning and its units are those of ``ModelSpec``."""

    engine: Annotated[str, AfterValidator(_known_engine)] = _DEFAULT.engine
    file: WeightsFile | None = None
    slots: PositiveInt | None = None
    context_length: PositiveInt | None = None
    threads: PositiveInt | None = None
    gpu_layers: int = Field(_DEFAULT.gpu_layers, ge=-1)
    aliases: Names = ()
    listed: bool = True
    projects: Names = ()
    price: PriceEntry = PriceEntry()
    lora_adapters: dict[str, GgufFile] = {}
    sampling: SamplerDefaults = SamplerDefaults()
    preload: bool = True
    replicas: PositiveInt | None = None
    hosts: Names = ()
    keep_alive: float | None = Field(None, gt=0)
    min_resident: float = Field(_DEFAULT.min_resident_s, ge=0, lt=1e6)
    pinned: bool = False
    exclusive_with: Names = ()
    forced_sampling: SamplerDefaults = SamplerDefaults()

    @field_validator("projects", "hosts", mode="before")
    @classmethod
    def _names_some(cls, value: Any, info: ValidationInfo) -> Any:
        if value == []:
            whom = {"projects": "projects", "hosts": "workers"}[str(info.field_name)]
            raise ValueError(f"it is empty; leave it out for all {whom}")
        return value

    def sizes(self, options: Mapping[str, Any]) -> tuple[int, int]:
        """Return the slots and the context of each: what is left out is as without an entry.

        ``options`` are those of the engine.
        """
        if self.engine == _DEFAULT.engine and self.file is not None:
            return fitting_sizes(Path(self.file), self.slots, self.context_length, options)
        context = self.context_length or _DEFAULT.context_length
        if self.file is not None and (told := options.get("model_type")):
            context = min(context, ggml_context(Path(self.file), library_name(told)) or context)
        return self.slots or _DEFAULT.slots, context
