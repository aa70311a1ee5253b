"""The models file: entries become model specs and routes; errors name file, line and key.

docs/models.example.yaml shows every key that the engines share.

A route divides requests among its targets by weight, and has fallbacks for a request whose target
cannot serve it. A route is not a model: it is not loaded, has no price and appears in no counter.
Its targets are models of the same file, never routes, so a route cannot lead into a cycle.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any

import yaml
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from pydantic import AfterValidator, Field, PositiveInt, ValidationInfo, field_validator

from inference_site.catalogue.engines.ctransformers import ggml_context
from inference_site.catalogue.engines.registry import ENGINES
from inference_site.catalogue.memory import fitting_sizes
from inference_site.catalogue.operator_settings import (
    GgufFile,
    InvalidSetting,
    Names,
    OperatorSettings,
    ResolvePath,
    SamplerDefaults,
    Text,
    WeightsFile,
)
from inference_site.core.domain.addresses import AllowedAddresses
from inference_site.core.domain.model_spec import (
    HIGHEST_PRICE,
    MAX_ID,
    ModelSpec,
    Price,
    is_model_id,
)
from inference_site.core.domain.request import Sampling
from inference_site.core.host import physical_cores, usable_cores

_UNKNOWN_CONTEXT = 2**20
"""Assumed for a model on another server whose entry gives no context length."""
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The C loader is ten times as fast; not every build of PyYAML has it."""
_DEFAULT = ModelSpec(id="", engine="llama_cpp")


class _Loader(_SafeLoader):  # type: ignore[misc]  # Its base is one of two.
    """Reads keys as they are written, such as the ids ``007``, ``yes`` and ``2026-01-01``.

    It names the line of a value that YAML takes for a date or number, and that is none.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        self.flatten_mapping(node)  # It merges what the key ``<<`` names.
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                key.tag = "tag:yaml.org,2002:str"
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except ValueError as exc:
            raise yaml.MarkedYAMLError(problem=str(exc), problem_mark=node.start_mark) from exc


class TargetEntry(OperatorSettings):
    """A target; its share of the requests is its weight divided by the sum of all weights."""

    model: Text
    weight: float = Field(1.0, ge=0, le=1e6)


class RouteEntry(OperatorSettings):
    """An entry with the key ``route``."""

    route: Annotated[tuple[TargetEntry, ...], Field(strict=False)]
    fallback: Names = ()
    max_queue_s: float | None = Field(None, ge=0)
    listed: bool = True

    @field_validator("route")
    @classmethod
    def _check_targets(cls, targets: tuple[TargetEntry, ...]) -> tuple[TargetEntry, ...]:
        if not targets:
            raise ValueError("it has no targets")
        if not any(target.weight for target in targets):
            raise ValueError("all weights are zero")
        return targets


@dataclass(frozen=True, slots=True)
class Target:
    """A model of a route. ``context_length`` is the entry's; a worker may announce another."""

    spec: ModelSpec
    context_length: int
    weight: float = 0.0


@dataclass(frozen=True, slots=True)
class Route:
    """A name for several models.

    A request also goes to a fallback if its estimated time in the queue exceeds ``max_queue_s``.
    """

    id: str
    targets: tuple[Target, ...]
    fallback: tuple[Target, ...] = ()
    max_queue_s: float | None = None
    is_listed: bool = True
    aliases: tuple[str, ...] = ()

    def is_for(self, project: str) -> bool:
        """Whether the project with this name may use one of the models."""
        return bool(self.candidates(project))

    def candidates(self, project: str, key: str = "", earlier: str = "") -> list[Target]:
        """Return the targets to try, in order: one target chosen by weight, then the fallbacks.

        The same ``key`` always chooses the same target. Without a key, the ``earlier`` target is
        chosen if it still has a weight, else a random one. The choice is weighted rendezvous
        hashing: a change of weights or targets moves as few keys as possible.
        """
        targets = [one for one in self.targets if one.weight and one.spec.is_for(project)]
        chosen = [] if key else [one for one in targets if one.spec.id == earlier]
        if targets and not chosen:
            hashed = f"{project}/{key or secrets.token_hex(16)}"
            chosen = [min(targets, key=lambda one: _rendezvous_score(one, hashed))]
        fallback = [one for one in self.fallback if one.spec.is_for(project)]
        return list({one.spec.id: one for one in (*chosen, *fallback)}.values())

    @property
    def specs(self) -> list[ModelSpec]:
        """All models of the route, targets first."""
        return list({one.spec.id: one.spec for one in (*self.targets, *self.fallback)}.values())


def _rendezvous_score(target: Target, key: str) -> float:
    """Return the score of a target; the lowest wins, for a part of all keys that is its weight."""
    digest = blake2b(f"{target.spec.id}/{key}".encode(), digest_size=8).digest()
    uniform = ((int.from_bytes(digest) >> 12) + 0.5) / 2**52
    return -math.log(uniform) / target.weight


def read_route(
    id_: str, entry: Mapping[str, Any], specs: Mapping[str, ModelSpec], entries: Mapping[str, Any]
) -> Route:
    """Return the route of an entry; ``specs`` are the models of the file. Raise InvalidSetting."""
    known = RouteEntry.read(dict(entry))

    def target(name: str, path: tuple[str, ...], weight: float = 0.0) -> Target:
        if (spec := specs.get(name)) is None:
            is_route = name in entries
            message = f"{name!r} is a route" if is_route else f"unknown model {name!r}"
            raise InvalidSetting(path, message)
        is_known = "context_length" in entries[name] or spec.file is not None
        return Target(spec, spec.context_length if is_known else _UNKNOWN_CONTEXT, weight)

    targets: dict[str, Target] = {}
    for number, one in enumerate(known.route):
        path = ("route", str(number), "model")
        if one.model in targets:
            raise InvalidSetting(path, f"{one.model!r} is there twice")
        targets[one.model] = target(one.model, path, one.weight)
    fallback = [target(name, ("fallback", str(i))) for i, name in enumerate(known.fallback)]
    return Route(id_, tuple(targets.values()), tuple(fallback), known.max_queue_s, known.listed)


_Key = tuple[str, ...]

_Amount = Annotated[float, Field(ge=0, le=HIGHEST_PRICE)]


class PriceEntry(OperatorSettings):
    """The price of a million tokens; cached input costs the same as other input by default."""

    input: _Amount = 0.0
    cached: _Amount | None = None
    output: _Amount = 0.0

    def to_price(self) -> Price:
        """Return the domain's value."""
        cached = self.input if self.cached is None else self.cached
        return Price(input=self.input, cached=cached, output=self.output)


def _check_engine(name: str) -> str:
    if name not in ENGINES:
        raise ValueError(f"unknown engine {name!r}; there are {', '.join(ENGINES)}")
    return name


class ModelEntry(OperatorSettings):
    """The keys of an entry that all engines share; their units are those of ``ModelSpec``."""

    engine: Annotated[str, AfterValidator(_check_engine)] = _DEFAULT.engine
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
    def _refuse_empty_list(cls, value: Any, info: ValidationInfo) -> Any:
        if value == []:
            whom = {"projects": "projects", "hosts": "workers"}[str(info.field_name)]
            raise ValueError(f"it is empty; leave it out for all {whom}")
        return value

    def sizes(self, options: Mapping[str, Any]) -> tuple[int, int]:
        """Return the slots and the context of each, with defaults for missing keys.

        ``options`` are those of the engine.
        """
        if self.engine == _DEFAULT.engine and self.file is not None:
            return fitting_sizes(Path(self.file), self.slots, self.context_length, options)
        context = self.context_length or _DEFAULT.context_length
        if self.file is not None and (model_type := options.get("model_type")):
            context = min(context, ggml_context(Path(self.file), model_type) or context)
        return self.slots or _DEFAULT.slots, context


def default_threads(engine: str) -> int:
    """Return the threads of a model on this host: all physical cores for llama.cpp.

    llama.cpp's threads sleep soon when they wait for each other while processors are short.
    Those of ctransformers spin forever, and one without a core stalls the others, so it gets half
    the cores.
    """
    return physical_cores() if engine == _DEFAULT.engine else max(1, int(usable_cores()) // 2)


def default_sampling() -> Sampling:
    """Return the setting ``SAMPLING``, which fills what requests and models leave out.

    Raise ImproperlyConfigured for a bad setting.
    """
    try:
        return SamplerDefaults.read(settings.SAMPLING).to_defaults()
    except InvalidSetting as exc:
        raise ImproperlyConfigured(f"{'.'.join(('SAMPLING', *exc.path))}: {exc}.") from exc


def read_models_file(path: Path) -> list[ModelSpec]:
    """Return the models, in order. Raise ImproperlyConfigured with file, line and key."""
    return read_models_and_routes(path)[0]


def read_models_and_routes(path: Path) -> tuple[list[ModelSpec], list[Route]]:
    """Return models and routes, in order. Raise ImproperlyConfigured with file, line and key."""

    def resolve(file: str, _endings: Sequence[str]) -> str:
        # ``manage.py pull`` stores hf:owner/name/file in MODELS_DIR. Other paths are relative to
        # the models file and may lead anywhere: the owner of the host writes this file.
        if "\0" in file:
            raise ValueError("a path has no NUL")
        if file.startswith("hf:"):
            return str(Path(settings.MODELS_DIR) / file.removeprefix("hf:"))
        return str(path.parent / file)

    lines: dict[_Key, int] = {}
    try:
        document = _load(path, lines)
        return _read_document(document, resolve)
    except yaml.MarkedYAMLError as exc:
        line = exc.problem_mark.line + 1 if exc.problem_mark else 1
        raise ImproperlyConfigured(f"{path}:{line}: is not YAML: {exc.problem}.") from exc
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as exc:
        raise ImproperlyConfigured(f"{path}: cannot be read: {exc}.") from exc
    except RecursionError as exc:
        raise ImproperlyConfigured(
            f"{path}: an alias is in the mapping that it stands for."
        ) from exc
    except InvalidSetting as exc:
        prefixes = (exc.path[:length] for length in range(len(exc.path), 0, -1))
        line = next((lines[key] for key in prefixes if key in lines), 1)
        raise ImproperlyConfigured(f"{path}:{line}: {'.'.join(exc.path)}: {exc}.") from exc


def entry_lines(path: Path) -> dict[str, int]:
    """Return the line of each model's file, or else of its entry, in a valid models file."""
    lines: dict[_Key, int] = {}
    _load(path, lines)
    ids = [key[1] for key in lines if len(key) == 2]
    return {id_: lines.get(("models", id_, "file"), lines["models", id_]) for id_ in ids}


def _load(path: Path, lines: dict[_Key, int]) -> Any:
    """Return the document with the key ``models``, and add the line of each key to ``lines``.

    Raise InvalidSetting for a duplicate key.
    """
    text = path.read_text(encoding="utf-8")
    document = yaml.load(text, _Loader)  # noqa: S506  # Both bases are safe.
    # A document that maps names to files only is the short form: it is the value of ``models``.
    is_short = isinstance(document, dict) and "models" not in document
    is_short = is_short and all(isinstance(value, str) for value in document.values())
    _add_lines(yaml.compose(text, _Loader), lines, ("models",) if is_short else ())
    return {"models": document} if is_short else document


def _add_lines(node: yaml.Node | None, lines: dict[_Key, int], parent: _Key) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    seen = set()
    for name, value in node.value:
        key = (*parent, str(name.value))
        lines[key] = name.start_mark.line + 1
        if key in seen:
            raise InvalidSetting(key, "it is there twice")
        seen.add(key)
        _add_lines(value, lines, key)


def _read_document(document: Any, resolve: ResolvePath) -> tuple[list[ModelSpec], list[Route]]:
    models = document.get("models") if isinstance(document, dict) else None
    if not isinstance(models, dict) or not models:
        raise InvalidSetting(("models",), "must map model ids to their settings")
    if unknown := document.keys() - {"models"}:
        raise InvalidSetting((min(unknown),), "unknown key")
    entries: dict[str, dict[str, Any]] = {}
    for id_, value in models.items():
        if not is_model_id(id_):
            raise InvalidSetting(("models", id_), f"an id has 1 to {MAX_ID} printable characters")
        entries[id_] = {"file": value} if isinstance(value, str) else value
        if not isinstance(entries[id_], dict):
            raise InvalidSetting(("models", id_), "must be a mapping, or the name of a file")
    specs, routes = {}, []
    for id_, entry in entries.items():
        if "route" not in entry:
            with _prefix_errors("models", id_):
                specs[id_] = read_entry(id_, entry, resolve)
    for id_, entry in entries.items():
        if "route" in entry:
            with _prefix_errors("models", id_):
                routes.append(read_route(id_, entry, specs, entries))
    return list(specs.values()), routes


@contextmanager
def _prefix_errors(*key: str) -> Iterator[None]:
    """Prepend the keys of the entry to the path of an InvalidSetting."""
    try:
        yield
    except InvalidSetting as exc:
        raise InvalidSetting((*key, *exc.path), str(exc)) from exc


def read_entry(
    id_: str, entry: dict[str, Any], resolve: ResolvePath, allowed: AllowedAddresses | None = None
) -> ModelSpec:
    """Return the spec of an entry; ``resolve`` turns names of files into paths.

    ``allowed`` are the addresses that its servers may have, None for any. Raise InvalidSetting.
    """
    shared = {name: value for name, value in entry.items() if name in ModelEntry.model_fields}
    own = {name: value for name, value in entry.items() if name not in shared}
    model = ModelEntry.read(shared, resolve)
    if model.lora_adapters and model.engine != _DEFAULT.engine:
        message = f"{model.engine} applies no adapters; {_DEFAULT.engine} would"
        raise InvalidSetting(("lora_adapters",), message)
    options = _read_options(model.engine, own, resolve)
    slots, context_length = model.sizes(options)
    return ModelSpec(
        id=id_,
        engine=model.engine,
        file=Path(model.file) if model.file else None,
        slots=slots,
        context_length=context_length,
        threads=model.threads or default_threads(model.engine),
        gpu_layers=model.gpu_layers,
        aliases=model.aliases,
        is_listed=model.listed,
        projects=model.projects,
        price=model.price.to_price(),
        lora_adapters={name: Path(file) for name, file in model.lora_adapters.items()},
        sampling=model.sampling.to_defaults().over(default_sampling()),
        is_preloaded=model.preload,
        replicas=model.replicas,
        hosts=model.hosts,
        keep_alive_s=model.keep_alive,
        min_resident_s=model.min_resident,
        is_pinned=model.pinned,
        exclusive_with=model.exclusive_with,
        forced_sampling=model.forced_sampling.to_defaults(),
        allowed_addresses=allowed if model.engine == "openai_upstream" else None,
        options=options,
    )


def _read_options(engine: str, given: dict[str, Any], resolve: ResolvePath) -> dict[str, Any]:
    """Return the engine's own options, with the paths of files."""
    options = ENGINES[engine].options
    if unknown := given.keys() - options.model_fields.keys():
        key = min(unknown)
        takers = [name for name in ENGINES if key in ENGINES[name].options.model_fields]
        if not takers:
            raise InvalidSetting((key,), "unknown key")
        message = f"{engine} takes no such option; {' and '.join(takers)} would"
        raise InvalidSetting((key,), message)
    return options.read(given, resolve).model_dump(exclude_unset=True)
