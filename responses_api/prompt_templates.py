"""Prompt templates: from ``prompt`` of a request to the request that it stands for.

A template has a developer message and a user message, whose ``{{names}}`` are variables. The values
of a request are put in as data, in one pass, so a value with braces stays as it is. The developer
message becomes ``instructions``, the user message the first item of ``input``; where the request
has ``instructions`` or a ``model`` of its own, these count.
"""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import orjson
from django.conf import settings
from django.db.models import F

from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.gateway.api.payload import MovedEntries, places_of, shown_name
from responses_api.models import PromptVersion
from responses_api.wire.input_items import InputText, MessageItem
from responses_api.wire.requests import PromptParam, PromptValue, ResponseRequest

_VARIABLE = re.compile(r"\{\{\s*([A-Za-z_][A-Za-z0-9_]{0,63})\s*\}\}")
_NUMBER = re.compile(r"[1-9][0-9]{0,8}", re.ASCII)

Values = Mapping[str, PromptValue]


def variables_of(version: PromptVersion) -> list[str]:
    """Return the names of the variables of a version, in order, each once."""
    texts = (version.developer_message, version.user_message)
    return list(dict.fromkeys(name for text in texts for name in _VARIABLE.findall(text)))


def with_template(project_id: int, body: ResponseRequest) -> ResponseRequest:
    """Return the request with the messages of the template that it names, if it names one.

    Raise InvalidRequestError for a template or version that the project does not have, and for
    variables that are missing, unknown, or too large together.
    """
    if body.prompt is None:
        return body
    version = _find(project_id, body.prompt)
    values = body.prompt.variables or {}
    _check(version, values)
    used = body.prompt.model_copy(update={"version": str(version.number)})
    fields: dict[str, object] = {"prompt": used}
    if body.model is None and version.model:
        fields["model"] = version.model
    if body.instructions is None and version.developer_message:
        fields["instructions"] = instructions_of(version, values)
    if version.user_message:
        given = body.input or []
        items = [user_message_of(version, values), *given]
        fields["input"] = MovedEntries(items, [None, *places_of(given)])
    return body.model_copy(update=fields)


def tried_id(version: PromptVersion, values: Values) -> str:
    """Return the id with which the playground opens a version with these values.

    Raise InvalidRequestError as ``with_template`` does.
    """
    _check(version, values)
    filled = {"version": version.number, "variables": values}
    encoded = base64.urlsafe_b64encode(orjson.dumps(filled)).decode().rstrip("=")
    return f"{version.template.public_id}.{encoded}"


def tried_messages(opened_id: str) -> tuple[PromptVersion, str, str] | None:
    """Return a version and its two messages, by an id from ``tried_id``; None if there is none.

    Raise InvalidRequestError as ``with_template`` does.
    """
    public_id, _, encoded = opened_id.partition(".")
    try:
        filled = orjson.loads(base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)))
        number, values = int(filled["version"]), dict(filled["variables"])
    except (ValueError, TypeError, KeyError):
        return None
    of_template = PromptVersion.objects.filter(template__public_id=public_id)
    version = of_template.filter(number=number).first()
    if version is None or not all(isinstance(value, str) for value in values.values()):
        return None
    _check(version, values)
    return version, instructions_of(version, values), str(user_message_of(version, values).content)


def _find(project_id: int, given: PromptParam) -> PromptVersion:
    of_template = PromptVersion.objects.filter(
        template__public_id=given.id, template__project_id=project_id
    )
    if given.version is not None:
        number = given.version if _NUMBER.fullmatch(given.version) else "0"
        found = of_template.filter(number=int(number)).first()
        if found is None and of_template.exists():
            raise InvalidRequestError(
                f"Prompt '{given.id}' has no version '{given.version[:100]}'.",
                param="prompt.version",
                code="prompt_version_not_found",
            )
    else:
        chosen = of_template.filter(number=F("template__default_version"))
        found = chosen.first() or of_template.order_by("-number").first()
    if found is None:
        raise InvalidRequestError(
            f"Prompt with id '{given.id[:100]}' not found.",
            param="prompt.id",
            code="prompt_not_found",
        )
    return found


def _check(version: PromptVersion, values: Values) -> None:
    names = variables_of(version)
    if missing := [name for name in names if name not in values]:
        raise InvalidRequestError(
            f"Missing required parameter: 'prompt.variables.{missing[0]}'.",
            param=f"prompt.variables.{missing[0]}",
            code="missing_required_parameter",
        )
    if unknown := [name for name in values if name not in names]:
        name = shown_name(unknown[0])
        raise InvalidRequestError(
            f"Unknown parameter: 'prompt.variables.{name}'. The prompt has no such variable.",
            param=f"prompt.variables.{name}",
            code="unknown_parameter",
        )
    texts = f"{version.developer_message}\0{version.user_message}"
    counts = Counter(_VARIABLE.findall(texts))
    sizes = {name: len(_shown(value)) for name, value in values.items()}
    if sum(count * sizes[name] for name, count in counts.items()) > settings.MAX_BODY_BYTES:
        raise InvalidRequestError(
            "The variables of the prompt are too long: the messages with them would have more than "
            f"{settings.MAX_BODY_BYTES} characters.",
            param="prompt.variables",
            code="string_above_max_length",
        )


def _shown(value: PromptValue) -> str:
    if isinstance(value, str):
        return value
    return value.text if isinstance(value, InputText) else value.model_dump_json()


def instructions_of(version: PromptVersion, values: Values) -> str:
    """Return the developer message with its values, which are texts.

    Raise InvalidRequestError for an image or a file, which only the user message can have.
    """

    def text_of(match: re.Match[str]) -> str:
        value = values[match[1]]
        if not isinstance(value, str | InputText):
            raise InvalidRequestError(
                f"Invalid 'prompt.variables.{match[1]}': the developer message of the prompt has "
                "this variable, so its value must be a text.",
                param=f"prompt.variables.{match[1]}",
                code="invalid_type",
            )
        return _shown(value)

    return _VARIABLE.sub(text_of, version.developer_message)


def user_message_of(version: PromptVersion, values: Values) -> MessageItem:
    """Return the user message: a text, or parts if a value is an image or a file."""
    parts: list[PromptValue] = [""]
    # The pieces of the text and the names of the variables take turns.
    for index, piece in enumerate(_VARIABLE.split(version.user_message)):
        value = values[piece] if index % 2 else piece
        last = parts[-1]
        if isinstance(value, str | InputText) and isinstance(last, str):
            parts[-1] = last + _shown(value)
        elif isinstance(value, str | InputText):
            parts.append(_shown(value))
        else:
            parts.append(value)
    if len(parts) == 1:
        return MessageItem(role="user", content=_shown(parts[0]))
    content: list[Any] = [
        InputText(type="input_text", text=part) if isinstance(part, str) else part
        for part in parts
        if part
    ]
    return MessageItem(role="user", content=content)
