"""From the fields about reasoning and the chat template to the variables of the template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inference_site.domain.model_spec import ModelSpec
from inference_site.request_fields.capabilities import require


def to_template_vars(
    switches: Mapping[str, Any], variables: Mapping[str, dict[str, Any] | None], spec: ModelSpec
) -> dict[str, Any]:
    """Return the variables. Raise InvalidRequestError for a model without a chat template.

    ``switches`` are the fields ``enable_thinking``, ``reasoning_effort`` and ``verbosity``;
    ``variables`` those that hold variables. Who sends a switch means it, so these win.
    """
    given = [name for name, value in {**switches, **variables}.items() if value is not None]
    if not given:
        return {}
    require("chat_template", given[0], spec)
    merged: dict[str, Any] = {}
    for values in variables.values():
        merged |= values or {}
    effort = switches.get("reasoning_effort")
    if effort is not None:
        merged["enable_thinking"] = effort != "none"
    return merged | {name: value for name, value in switches.items() if value is not None}
