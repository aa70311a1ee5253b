"""What a model that somebody else's server runs may be asked for, and its options."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    Field,
    HttpUrl,
    PositiveInt,
    Secret,
    SecretStr,
    ValidationInfo,
    field_validator,
)

from inference_site.catalogue.engines.options import EngineOptions
from inference_site.catalogue.engines.upstream_flavors import (
    FIELDS,
    FLAVORS,
    Capability,
    FlavorName,
)
from inference_site.catalogue.operator_settings import AnyText, Text, file_name
from inference_site.domain.model_spec import ModelSpec

_DEFAULT_FLAVOR: FlavorName = "openai"


def _without_query(url: HttpUrl) -> HttpUrl:
    if url.query is not None or url.fragment is not None or url.username or url.password:
        raise ValueError("must have neither a query nor a password")
    return url


def _known_field(name: str) -> str:
    if name not in FIELDS:
        raise ValueError("unknown name of a field; docs/engines.md lists them")
    return name


def fits_header(text: str) -> str:
    """Return the text. Raise ValueError for one that cannot be the name or value of a header."""
    if not text or not text.isascii() or not text.isprintable():
        raise ValueError("must fit into a header: printable ASCII, and not empty")
    return text


_HeaderText = Annotated[AnyText, AfterValidator(fits_header)]


_BaseUrl = Annotated[HttpUrl, AfterValidator(_without_query)]


class ServerOptions(EngineOptions):
    """How a model's server is spoken to, whoever has started it; see docs/engines.md."""

    model: Text | None = None
    flavor: FlavorName = _DEFAULT_FLAVOR
    capabilities: list[Capability] | None = None
    fields: dict[Annotated[str, AfterValidator(_known_field)], Text | None] = {}
    chat_template_kwargs: dict[str, Any] = {}
    timeout_s: float = Field(120.0, gt=0, lt=1e6)
    check_every_s: float = Field(5.0, ge=0.1, lt=1e6)


class UpstreamOptions(ServerOptions):
    """Where a model's servers are, and the key for them; see docs/engines.md.

    ``base_url`` or ``base_urls`` is needed; the servers of a list are alike. One of ``api_key``,
    ``api_key_env`` and ``api_key_file`` may be given; the worker reads the variable or the file
    when it loads the model. ``connections`` has no effect any more: idle connections are closed
    after seconds.
    """

    base_url: _BaseUrl | None = None
    base_urls: list[_BaseUrl] = Field([], max_length=64, validate_default=True)
    connections: PositiveInt | None = None
    api_key: Annotated[SecretStr, Field(min_length=1)] | None = None
    api_key_env: Text | None = None
    api_key_file: Annotated[AnyText, file_name()] | None = None
    headers: dict[_HeaderText, Secret[_HeaderText]] = {}

    @property
    def addresses(self) -> list[HttpUrl]:
        """The addresses of all servers."""
        return self.base_urls if self.base_url is None else [self.base_url]

    @field_validator("base_urls")
    @classmethod
    def _one_way_to_name_servers(cls, value: list[HttpUrl], info: ValidationInfo) -> list[HttpUrl]:
        if "base_url" not in info.data:  # It is there, and wrong.
            return value
        if value and info.data["base_url"] is not None:
            raise ValueError("cannot be used together with 'base_url'")
        if not value and info.data["base_url"] is None:
            raise ValueError("it is missing, as is 'base_url': the address of a server, up to /v1")
        return value

    @field_validator("api_key_env", "api_key_file")
    @classmethod
    def _one_key(cls, value: str, info: ValidationInfo) -> str:
        for other in ("api_key", "api_key_env"):
            if info.data.get(other) is not None:
                raise ValueError(f"cannot be used together with '{other}'")
        return value


def honoured(spec: ModelSpec) -> frozenset[str]:
    """Return the names of fields that the model's server is told of."""
    given = spec.options
    named = {**FLAVORS[given.get("flavor", _DEFAULT_FLAVOR)].fields, **given.get("fields", {})}
    return frozenset(name for name, target in named.items() if target is not None)


def capabilities(spec: ModelSpec) -> frozenset[str]:
    """Return what requests to this model may ask for: what is declared, else the flavor's."""
    declared = spec.options.get("capabilities")
    if declared is not None:
        return frozenset(declared)
    return FLAVORS[spec.options.get("flavor", _DEFAULT_FLAVOR)].capabilities
