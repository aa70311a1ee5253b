"""The options of a model that a server of somebody else runs, checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from inference_site.catalogue.engines.openai_upstream import DEFAULT_FLAVOR
from inference_site.catalogue.engines.upstream_flavors import CAPABILITIES, FIELDS, FLAVORS, Flavor
from inference_site.domain.errors import EngineLoadError
from inference_site.domain.model_spec import ModelSpec

_TIMEOUT_S = 120.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class UpstreamOptions:
    """Where the server is, and how it is spoken to.

    ``model`` is its name there; None: see ``Upstream.find_model``. ``timeout_s`` bounds the waiting
    for a connection, for the first chunk, and for each later one.
    """

    base_url: str
    model: str | None
    flavor: Flavor
    fields: Mapping[str, str]
    timeout_s: float
    connections: int
    key: str | None = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)

    @property
    def root_url(self) -> str:
        """The address without ``/v1``: some servers have their own endpoints there."""
        return self.base_url.removesuffix("/v1")

    def without_key(self, text: str) -> str:
        """Return a text of the server without the key, should it repeat it."""
        return text.replace(self.key, "***") if self.key else text


def parse_options(spec: ModelSpec) -> UpstreamOptions:
    """Return the options. Raise EngineLoadError naming the model and the key."""
    flavor = FLAVORS.get(_option(spec, "flavor", _text, DEFAULT_FLAVOR))
    if flavor is None:
        raise _bad(spec, "flavor", f"must be one of {', '.join(FLAVORS)}")
    _option(spec, "capabilities", _capabilities, None)
    _option(spec, "chat_template_kwargs", _mapping, None)
    unchanged: dict[str, str | None] = {}
    changed = _option(spec, "fields", _fields, unchanged)
    return UpstreamOptions(
        base_url=_option(spec, "base_url", _url, None) or _missing(spec, "base_url"),
        model=_option(spec, "model", _text, None),
        flavor=flavor,
        fields={k: v for k, v in {**flavor.fields, **changed}.items() if v is not None},
        timeout_s=_option(spec, "timeout_s", _seconds, _TIMEOUT_S),
        connections=_option(spec, "connections", _count, spec.slots),
        key=_key(spec),
        headers=_option(spec, "headers", _headers, {}),
    )


def _option(spec: ModelSpec, name: str, read: Callable[[Any], T], default: T) -> T:
    if name not in spec.options:
        return default
    try:
        return read(spec.options[name])
    except ValueError as exc:
        raise _bad(spec, name, str(exc)) from exc


def _bad(spec: ModelSpec, name: str, reason: str) -> EngineLoadError:
    return EngineLoadError(f"Model '{spec.id}': '{name}' {reason}.")


def _missing(spec: ModelSpec, name: str) -> str:
    raise _bad(spec, name, "is missing: the address of an OpenAI-compatible API, up to /v1")


def _key(spec: ModelSpec) -> str | None:
    """Return the key, wherever it is kept."""
    given = [name for name in ("api_key", "api_key_env", "api_key_file") if name in spec.options]
    if not given:
        return None
    if len(given) > 1:
        raise _bad(spec, given[1], f"cannot be used together with '{given[0]}'")
    [name] = given
    value = _option(spec, name, _text, "")
    if name == "api_key_env":
        value = os.environ.get(value) or _absent(spec, name, f"names {value}, which is not set")
    elif name == "api_key_file":
        try:
            value = Path(value).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as exc:
            raise _bad(spec, name, f"cannot be read: {exc}") from exc
    if not value or not value.isascii() or not value.isprintable():
        raise _bad(spec, name, "must hold a key that fits into a header")
    return value


def _absent(spec: ModelSpec, name: str, reason: str) -> str:
    raise _bad(spec, name, reason)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("must be a text")
    return value


def _url(value: Any) -> str:
    parts = urlsplit(_text(value))
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be an address, http://… or https://…")
    if parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError("must have neither a query nor a password")
    _ = parts.port  # Raises ValueError for a bad one.
    return str(value).rstrip("/")


def _seconds(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e6:
        raise ValueError("must be a number of seconds above 0")
    return float(value)


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError("must be a whole number from 1")
    return value


def _mapping(value: Any) -> dict[str, Any] | None:
    return _mapped(value)


def _mapped(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("must be a mapping")
    return value


def _headers(value: Any) -> dict[str, str]:
    headers = {str(name): str(content) for name, content in _mapped(value).items()}
    for text in (*headers, *headers.values()):
        if not text or not text.isascii() or not text.isprintable():
            raise ValueError("must map names to texts that fit into a header")
    return headers


def _fields(value: Any) -> dict[str, str | None]:
    fields = _mapped(value)
    if unknown := fields.keys() - FIELDS:
        raise ValueError(f"has the unknown name {min(unknown, key=str)!r}")
    if not all(name is None or (isinstance(name, str) and name) for name in fields.values()):
        raise ValueError("must map names to the server's names, or to null")
    return fields


def _capabilities(value: Any) -> list[str] | None:
    if not isinstance(value, list) or not all(name in CAPABILITIES for name in value):
        raise ValueError(f"must be a list of some of {', '.join(sorted(CAPABILITIES))}")
    return value
