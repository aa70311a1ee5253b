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
from inference_site.catalogue.operator_settings import AnyText, FileName, Text
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


class UpstreamOptions(EngineOptions):
    """Where a model's server is and how it is spoken to; see docs/engines.md.

    One of ``api_key``, ``api_key_env`` and ``api_key_file`` may be given; the worker reads the
    variable or the file when it loads the model. ``connections`` is how many idle ones are kept,
    None for as many as there are slots.
    """

    base_url: Annotated[HttpUrl, AfterValidator(_without_query)] = Field(
        description="the address of an OpenAI-compatible API, up to /v1"
    )
    model: Text | None = None
    flavor: FlavorName = _DEFAULT_FLAVOR
    capabilities: list[Capability] | None = None
    fields: dict[Annotated[str, AfterValidator(_known_field)], Text | None] = {}
    chat_template_kwargs: dict[str, Any] = {}
    timeout_s: float = Field(120.0, gt=0, lt=1e6)
    connections: PositiveInt | None = None
    api_key: Annotated[SecretStr, Field(min_length=1)] | None = None
    api_key_env: Text | None = None
    api_key_file: FileName | None = None
    headers: dict[_HeaderText, Secret[_HeaderText]] = {}

    @field_validator("api_key_env", "api_key_file")
    @classmethod
    def _one_key(cls, value: str, info: ValidationInfo) -> str:
        for other in ("api_key", "api_key_env"):
            if info.data.get(other) is not None:
                raise ValueError(f"cannot be used together with '{other}'")
        return value


def honoured(spec: ModelSpec) -> frozenset[str]:
    """Return the names of fields that the model's server is told of."""
    options = UpstreamOptions.of(spec)
    named = {**FLAVORS[options.flavor].fields, **options.fields}
    return frozenset(name for name, target in named.items() if target is not None)


def capabilities(spec: ModelSpec) -> frozenset[str]:
    """Return what requests to this model may ask for: what is declared, else the flavor's."""
    declared = spec.options.get("capabilities")
    if declared is not None:
        return frozenset(declared)
    return FLAVORS[spec.options.get("flavor", _DEFAULT_FLAVOR)].capabilities
