"""Builds the OpenAPI document from the views' declarations (``schema.py``).

``documentation.py`` serves and caches it. The JSON schemas of all declared types are generated
together, so that models with the same name in several apps get different component names.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, Literal

import orjson
from drf_spectacular.extensions import OpenApiAuthenticationExtension
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.openapi import AutoSchema
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse
from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode

from inference_site.core.errors import api_errors
from inference_site.gateway.api.field_descriptions import FIELDS
from inference_site.gateway.api.form_bodies import FormParser
from inference_site.gateway.api.schema import ErrorEnvelope, declared, documented

Schema = dict[str, Any]

_JSON, _SSE, _LINES = "application/json", "text/event-stream", "application/x-ndjson"
_FORM = "multipart/form-data"
_STREAMABLE = (
    "The answer; with `stream`, events: the schema is that of each `data`; the last is `[DONE]`."
)
_STREAMABLE_LINES = "The answer; a stream, unless `stream` is false, has such lines of JSON."
_METRICS: Schema = {
    "operationId": "getMetrics",
    "summary": "Get the metrics of this process and of the site",
    "description": "For peers in `METRICS_ALLOWED_NETWORKS`, or with `METRICS_TOKEN` as bearer.",
    "tags": ["metrics"],
    "responses": {
        "200": {
            "description": "In the text format of Prometheus, or of OpenMetrics if accepted.",
            "content": {
                "text/plain": {"schema": {"type": "string"}},
                "application/openmetrics-text": {"schema": {"type": "string"}},
            },
        },
        "401": {
            "description": api_errors.AuthenticationError.__doc__,
            "content": {_JSON: {"schema": {"$ref": "#/components/schemas/ErrorEnvelope"}}},
        },
    },
}
"""``GET /metrics``, which is not a DRF view."""


@cache
def document() -> bytes:
    """Return the document, encoded."""
    generator = Generator()  # type: ignore[no-untyped-call]  # Untyped library.
    return orjson.dumps(generator.get_schema(public=True))


class Generator(SchemaGenerator):
    """Builds the document, with the wire models as its components."""

    def get_schema(self, request: Any = None, public: bool = False) -> Schema:
        document: Schema = super().get_schema(request, public)  # type: ignore[no-untyped-call]
        document["paths"]["/metrics"] = {"get": _METRICS}
        schemas = document["components"]["schemas"] = dict(sorted(_schemas()[1].items()))
        for component, schema in schemas.items():
            # A component may be one of two with its name.
            model = component.rpartition("__")[2].removesuffix("-Input").removesuffix("-Output")
            for name, field in schema.get("properties", {}).items():
                text = FIELDS.get(f"{model}.{name}") or FIELDS.get(name)
                if "const" in field:
                    text = f"Always `{field['const']}`."
                if text and "description" not in field:
                    field["description"] = text
        return document


class ViewSchema(AutoSchema):
    """Describes the declared methods of a view."""

    @property
    def _endpoint(self) -> documented:
        endpoint: documented = getattr(self.view, self.method.lower()).documented
        return endpoint

    def is_excluded(self) -> bool:
        # These are described under /v1.
        is_second_path = self.path in ("/tokenize", "/detokenize", "/tokenizer_info", "/v2/rerank")
        is_declared = hasattr(getattr(self.view, self.method.lower()), "documented")
        return is_second_path or not is_declared

    def get_operation(self, *args: Any) -> Schema | None:
        operation: Schema | None = super().get_operation(*args)
        if operation is not None and "requestBody" in operation:
            operation["requestBody"]["required"] = True
        return operation

    def get_operation_id(self) -> str:
        api = "Ollama" if self.path.startswith("/api/") else ""
        return self.method.lower() + api + type(self.view).__name__.removesuffix("View")

    def get_summary(self) -> str:
        return self._docstring()[0].removesuffix(".")

    def get_description(self) -> str:  # type: ignore[override]  # As in the base class.
        return self._docstring()[1]

    def _docstring(self) -> tuple[str, str]:
        """Return the first line of the method's docstring, and the rest."""
        text = inspect.cleandoc(getattr(self.view, self.method.lower()).__doc__ or "")
        summary, _, description = text.partition("\n")
        return summary, description.strip()

    def get_request_serializer(self) -> Any:
        endpoint = self._endpoint
        if endpoint.form is not None:
            return {_FORM: _schema(endpoint.form, "validation")}
        if endpoint.body is None:
            return None
        forms = [p.media_type for p in self.view.parser_classes if issubclass(p, FormParser)]
        schema = _schema(endpoint.body, "validation")
        return dict.fromkeys((_JSON, *forms), schema)

    def get_response_serializers(self) -> Any:
        endpoint = self._endpoint
        text = "The answer." if endpoint.event is None else _STREAMABLE
        text = text if endpoint.lines is None else _STREAMABLE_LINES
        responses: dict[Any, Any] = {}
        if endpoint.answer is not None:
            responses[200, _JSON] = OpenApiResponse(_schema(endpoint.answer), text)
        for media_type in (*endpoint.texts, *endpoint.binaries):
            other = {"type": "string"}
            if media_type in endpoint.binaries:
                other["format"] = "binary"
            responses[200, media_type] = OpenApiResponse(other, text)
        if endpoint.event is not None:
            responses[200, _SSE] = OpenApiResponse(_schema(endpoint.event), text)
        if endpoint.lines is not None:
            responses[200, _LINES] = OpenApiResponse(_schema(endpoint.lines), text)
        errors: list[type[api_errors.ApiError]] = [
            api_errors.InvalidRequestError,
            api_errors.InternalError,
            api_errors.UnavailableError,
            *endpoint.errors,
        ]
        if self.view.get_authenticators():
            errors += (api_errors.AuthenticationError, api_errors.ForbiddenError)
        if endpoint.body is not None or endpoint.form is not None:
            errors += (api_errors.PayloadTooLargeError, api_errors.UnsupportedMediaError)
        if endpoint.queued or "{" in self.path:
            errors.append(api_errors.NotFoundError)
        if endpoint.queued:
            errors += (api_errors.RateLimitError, api_errors.QueueTimeoutError)
        for error in sorted(errors, key=lambda error: error.status):
            body = endpoint.also.get(error.status, endpoint.error or ErrorEnvelope)
            responses[error.status, _JSON] = OpenApiResponse(_schema(body), error.__doc__ or "")
        return responses

    def get_override_parameters(self) -> list[Any]:
        parameters: list[Any] = []
        if self._endpoint.query is not None:
            schema = TypeAdapter(self._endpoint.query).json_schema()
            for name, field in schema["properties"].items():
                kept = {k: value for k, value in field.items() if k not in ("title", "default")}
                parameters.append(
                    OpenApiParameter(
                        name,
                        kept,
                        description=kept.pop("description", "") or FIELDS.get(name, ""),
                        required=name in schema.get("required", ()),
                        style="deepObject" if kept["type"] == "object" else None,
                        default=field.get("default"),
                    )
                )
        parameters += [
            _header("x-request-id", str, True, "The id in the request, if it is valid."),
            _header("openai-processing-ms", int, True, "Time until the answer began."),
            _header("Retry-After", int, [429, 503, 504], "Seconds."),
            _header("WWW-Authenticate", str, [401], "`Bearer`."),
        ]
        if self._endpoint.queued:
            parameters += [
                OpenApiParameter(name, type_, "header", description=text, response=[200])
                for name, type_, text in _QUEUED_HEADERS
            ]
        return parameters


_QUEUED_HEADERS = (
    (
        "x-unsupported-params",
        str,
        "Fields of the request that were ignored, separated by commas.",
    ),
    ("x-model", str, "The model that answers; of a route, the one that was chosen."),
    ("x-queue-position", int, "How many starts it takes until it has begun; 0: a slot is free."),
    (
        "x-queue-estimated-wait",
        int,
        "In about how many seconds it begins, where that is known.",
    ),
)
"""Response headers of endpoints that a worker answers; each may be missing."""


def _header(
    name: str, type_: type, statuses: Literal[True] | list[int], text: str
) -> OpenApiParameter:
    """Return a header that responses with these statuses always have."""
    return OpenApiParameter(name, type_, "header", True, text, response=statuses)


class KeyScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]  # Untyped library.
    """The API key, in either of two headers."""

    target_class = "inference_site.gateway.api.authentication.KeyAuthentication"
    name = ["bearer", "x-api-key"]

    def get_security_definition(self, auto_schema: AutoSchema) -> list[Schema]:
        return [
            {"type": "http", "scheme": "bearer"},
            {"type": "apiKey", "in": "header", "name": "x-api-key"},
        ]

    def get_security_requirement(self, auto_schema: AutoSchema) -> list[dict[str, list[Any]]]:
        return [{name: []} for name in self.name]


class _WireSchema(GenerateJsonSchema):
    """Generates schemas of responses: only fields that default to None are optional."""

    def field_is_required(self, field: Any, total: bool) -> bool:
        schema = field["schema"]
        if self.mode == "serialization" and schema["type"] == "default":
            return schema.get("default", ...) is not None
        return super().field_is_required(field, total)


def _schema(type_: Any, mode: JsonSchemaMode = "serialization") -> Schema:
    """Return the schema of a declared type, usually a reference to a component."""
    return _schemas()[0][id(type_), mode]


@cache
def _schemas() -> tuple[dict[tuple[int, JsonSchemaMode], Schema], Schema]:
    """Return the schemas of all declared types, by (id of type, mode), and their components."""
    types: dict[tuple[int, JsonSchemaMode], Any] = {}
    for endpoint in declared:
        streamed = (endpoint.event, endpoint.lines)
        errors = (ErrorEnvelope, endpoint.error, *endpoint.also.values())
        sent = (endpoint.answer, *streamed, *errors)
        types |= {(id(type_), "serialization"): type_ for type_ in sent if type_ is not None}
        for body in (endpoint.body, endpoint.form):
            if body is not None:
                types[id(body), "validation"] = body
    schemas, definitions = TypeAdapter.json_schemas(
        [(key, mode, TypeAdapter(type_)) for (key, mode), type_ in types.items()],
        ref_template="#/components/schemas/{model}",
        schema_generator=_WireSchema,
    )
    return schemas, definitions["$defs"]
