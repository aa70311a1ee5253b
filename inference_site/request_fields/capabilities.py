"""What a model can be asked for; what it cannot do is refused before it is queued."""

from __future__ import annotations

from inference_site.domain.model_spec import ModelSpec
from inference_site.errors.api_errors import InvalidRequestError
from inference_site.fleet.fleet import capabilities_of

_ENDPOINTS = {
    "chat": "chat completions",
    "completions": "completions",
    "embeddings": "embeddings",
    "render": "chat prompts",
    "tokens": "tokens",
}


def require(capability: str, param: str, spec: ModelSpec) -> None:
    """Raise InvalidRequestError naming the parameter that the model has no use for."""
    if capability not in capabilities_of(spec):
        raise InvalidRequestError(
            f"Unsupported parameter: '{param}' is not supported with the model `{spec.id}`.",
            param=param,
            code="unsupported_parameter",
        )


def require_endpoint(capability: str, spec: ModelSpec) -> None:
    """Raise InvalidRequestError for a model that is not for this endpoint at all."""
    if capability not in capabilities_of(spec):
        raise InvalidRequestError(
            f"The model `{spec.id}` does not support {_ENDPOINTS[capability]}.",
            param="model",
            code="unsupported_model",
        )
