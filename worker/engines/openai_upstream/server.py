"""The connection settings of a model's servers, from the model's options."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
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
from inference_site.core.domain.addresses import AllowedAddresses
from inference_site.core.domain.errors import EngineLoadError
from inference_site.core.domain.model_spec import ModelSpec


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
    """The servers of one model, all of one kind, and the settings of their API.

    ``model`` is the model's name there; None: see ``Health``. ``template_vars`` are default
    variables of the chat template. ``timeout_s`` bounds the wait for a connection and for each
    chunk; ``check_every_s`` is the interval of the health checks. ``allowed_addresses`` are the
    only ones to connect to; None: any. ``socket`` is the path of a unix socket to connect to
    instead.
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
        """Return a text of the server with the key replaced by asterisks."""
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
        timeout_s=1e6,  # ``OwnServer`` checks that the server is alive; a prompt may take long.
        check_every_s=5.0,
        key=at.key,
        headers={},
        socket=at.socket,
    )


def _key(spec: ModelSpec, options: UpstreamOptions) -> str | None:
    """Return the server's key from the option that names its source; None without one.

    Raise EngineLoadError naming the option.
    """
    option = ""
    try:
        if options.api_key:
            option = "api_key"
            return fits_header(options.api_key.get_secret_value())
        if variable := options.api_key_env:
            option = "api_key_env"
            value = os.environ.get(variable)
            if not value:
                raise ValueError(f"names {variable}, which is not set")
            return fits_header(value)
        if file := options.api_key_file:
            option = "api_key_file"
            try:
                return fits_header(Path(file).read_text(encoding="utf-8").strip())
            except (OSError, UnicodeDecodeError) as exc:
                raise ValueError(f"cannot be read: {exc}") from exc
    except ValueError as exc:
        raise EngineLoadError(f"Model '{spec.id}': '{option}' {exc}.") from exc
    return None
