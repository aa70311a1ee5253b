"""Models as a caller sees them: which there are for it, and which of them it may use."""

from __future__ import annotations

from django.conf import settings

from inference_site.accounts.keys import Caller
from inference_site.catalogue.catalogue import catalogue
from inference_site.domain.model_spec import ModelSpec
from inference_site.errors.api_errors import ForbiddenError, InvalidRequestError, NotFoundError
from inference_site.submission.serving import require_served


def served_model(caller: Caller, name: str | None, *, background: bool = False) -> ModelSpec:
    """Return the model of this name; without one, the site's default.

    Raise InvalidRequestError when there is none, NotFoundError for one that is unknown or for other
    projects, ForbiddenError for one that the caller's key does not allow, and UnavailableError when
    no worker serves it (see ``require_served``).
    """
    name = name or settings.DEFAULT_MODEL
    if not name:
        raise InvalidRequestError(
            "Missing required parameter: 'model'.", param="model", code="missing_required_parameter"
        )
    spec = catalogue().find(name, caller.project_name)
    if spec is None:
        raise NotFoundError(
            f"The model `{name[:100]}` does not exist or you do not have access to it.",
            param="model",
            code="model_not_found",
        )
    if not may_use(caller, spec):
        raise ForbiddenError(
            f"This API key does not allow the model `{spec.id}`.",
            param="model",
            code="model_not_allowed",
        )
    require_served(spec, background=background)
    return spec


def may_use(caller: Caller, spec: ModelSpec) -> bool:
    """Whether the caller's key allows this model."""
    return not caller.allowed_models or spec.id in caller.allowed_models
