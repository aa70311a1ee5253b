"""Which tools a model sees, and whether it must call one of them."""

from __future__ import annotations

from dataclasses import dataclass

from inference_site.domain.request import Tool
from inference_site.errors.api_errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """Which tools the model sees, and whether it must call one of them.

    ``is_legacy``: they came as ``functions``, and the answer has a ``function_call``.
    """

    tools: tuple[Tool, ...] = ()
    must_call: bool = False
    is_legacy: bool = False


def only(
    tools: tuple[Tool, ...], names: list[str], param: str = "tool_choice", among: str = "tools"
) -> tuple[Tool, ...]:
    """Return the named tools; a model that does not see the others cannot call them.

    Raise InvalidRequestError for a name that is not there.
    """
    known = {tool.name for tool in tools}
    if missing := [name for name in names if name not in known]:
        raise InvalidRequestError(
            f"Invalid value for '{param}': there is no tool named '{missing[0]}' in '{among}'.",
            param=param,
        )
    return tuple(tool for tool in tools if tool.name in names)
