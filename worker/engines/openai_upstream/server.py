"""The servers of a model: their options, with the key read from where it is kept."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx

from inference_site.catalogue.engines.openai_upstream import (
    FLAVORS,
    Flavor,
    UpstreamOptions,
    fits_header,
)
from inference_site.domain.addresses import AllowedAddresses
from inference_site.domain.errors import EngineLoadError
from inference_site.domain.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server of this worker listens: at a port, or on the unix socket of this path."""

    root: str
    port: int
    key: str = field(repr=False)
    socket: str = ""

    def client(self, timeout_s: float) -> httpx.Client:
        """Return a client that sends the key."""
        return httpx.Client(
            base_url=self.root,
            headers={"Authorization": f"Bearer {self.key}"},
            timeout=timeout_s,
            transport=httpx.HTTPTransport(uds=self.socket or None, trust_env=False),
            trust_env=False,
        )


@dataclass(frozen=True, slots=True)
class Server:
    """Where the servers are, all of one kind, and how they are spoken to.

    ``model`` is its name there; None: see ``Health``. ``template_vars`` are variables of the chat
    template that requests do not set. ``timeout_s`` bounds the waiting for a connection, for the
    first chunk, and for each later one; ``check_every_s`` is how often a server's health is asked.
    ``allowed_addresses`` are the only ones that are connected to; None: any. ``socket`` is the path
    of a unix socket that is connected to instead.
    """

    base_urls: tuple[str, ...]
    model: str | None
    flavor: Flavor
    fields: Mapping[str, str]
    template_vars: Mapping[str, Any]
    timeout_s: float
    check_every_s: float
    key: str | None = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)
    allowed_addresses: AllowedAddresses | None = None
    socket: str = ""

    def without_key(self, text: str) -> str:
        """Return a text of the server without the key, should it repeat it."""
        return text.replace(self.key, "***") if self.key else text


def server_of(spec: ModelSpec) -> Server:
    """Return the server of a model. Raise EngineLoadError naming the model and the key."""
    options = UpstreamOptions.of(spec)
    flavor = FLAVORS[options.flavor]
    allowed = spec.allowed_addresses
    if allowed and not all(allowed.may_name(url.host or "") for url in options.addresses):
        raise EngineLoadError(f"Model '{spec.id}': an address of its servers is not allowed.")
    return Server(
        base_urls=tuple(dict.fromkeys(str(url).rstrip("/") for url in options.addresses)),
        model=options.model,
        flavor=flavor,
        fields={k: v for k, v in {**flavor.fields, **options.fields}.items() if v is not None},
        template_vars=options.chat_template_kwargs,
        timeout_s=options.timeout_s,
        check_every_s=options.check_every_s,
        key=_key(spec, options),
        headers={name: value.get_secret_value() for name, value in options.headers.items()},
        allowed_addresses=allowed,
    )


def own_server(
    spec: ModelSpec,
    flavor: Flavor,
    at: Endpoint,
    template_vars: Mapping[str, Any] = MappingProxyType({}),
) -> Server:
    """Return the server of a model that this worker has started."""
    return Server(
        base_urls=(f"{at.root}/v1",),
        model=spec.id,
        flavor=flavor,
        fields=flavor.fields,
        template_vars=template_vars,
        timeout_s=1e6,  # Its pulse is felt (see ``OwnServer``): a long prompt takes what it takes.
        check_every_s=5.0,
        key=at.key,
        headers={},
        socket=at.socket,
    )


def _key(spec: ModelSpec, options: UpstreamOptions) -> str | None:
    """Return the server's key from the one place that the options name, if they name one."""
    places = {
        "api_key": options.api_key and options.api_key.get_secret_value,
        "api_key_env": options.api_key_env and partial(_variable, options.api_key_env),
        "api_key_file": options.api_key_file and partial(_content, options.api_key_file),
    }
    for name, read in places.items():
        if read:
            try:
                return fits_header(read())
            except ValueError as exc:
                raise EngineLoadError(f"Model '{spec.id}': '{name}' {exc}.") from exc
    return None


def _variable(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise ValueError(f"names {name}, which is not set")
    return value


def _content(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise ValueError(f"cannot be read: {exc}") from exc
