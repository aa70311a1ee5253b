"""Models as a project sees them: those that are for other projects do not exist for it."""

from __future__ import annotations

from django.conf import settings

from inference_site.accounts.keys import Caller
from inference_site.http.enqueue import served_model
from inference_site.http.errors import NotFoundError
from worker.catalog import catalog
from worker.engines.base import ModelSpec


def usable_model(caller: Caller, name: str | None, *, background: bool = False) -> ModelSpec:
    """Return the model of this name; without one, the site's default (see ``served_model``).

    Raise NotFoundError for one of other projects, whether or not a worker serves it.
    """
    wanted = name or settings.DEFAULT_MODEL
    if not wanted:
        return served_model(caller, None, background=background)
    spec = catalog().find(wanted, caller.project_name)
    if spec is None:
        raise NotFoundError(
            f"The model `{wanted[:100]}` does not exist or you do not have access to it.",
            param="model",
            code="model_not_found",
        )
    return served_model(caller, spec.id, background=background)
