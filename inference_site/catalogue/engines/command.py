"""A model whose server the worker starts by a command of the models file, and its options."""

from __future__ import annotations

import shlex
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, ValidationInfo, field_validator

from inference_site.catalogue.engines.openai_upstream import ServerOptions
from inference_site.catalogue.operator_settings import AnyText, Text

PLACEHOLDERS = ("api_key", "file", "gpus", "host", "id", "models_dir", "port", "socket")
_SOME = dict.fromkeys(PLACEHOLDERS, "")


def _command(text: str) -> str:
    """Return the command. Raise ValueError for one that cannot be split or filled in."""
    if not words_of(text, _SOME):
        raise ValueError("is empty")
    return text


def words_of(command: str, values: dict[str, str]) -> list[str]:
    """Return the words of a command, split as a shell does, each with its placeholders filled in.

    No shell runs it. Raise ValueError for quotes that do not close and for unknown placeholders.
    """
    try:
        return [word.format_map(values) for word in shlex.split(command)]
    except (KeyError, IndexError, AttributeError) as exc:
        known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
        raise ValueError(f"has an unknown placeholder, {exc}; there are {known}") from exc
    except ValueError as exc:
        raise ValueError(f"cannot be read: {exc}") from exc


_Command = Annotated[AnyText, AfterValidator(_command)]


class CommandOptions(ServerOptions):
    """How a server is started and stopped, and how it is spoken to; see docs/engines.md.

    ``ready`` is the path that answers with status 200 once the server can be used; without it, it
    is the flavor's. ``gpus`` are the numbers of the GPUs that it may see. ``sleep`` is vLLM's level
    of sleep: when the model makes room, its server goes to sleep instead of ending.
    """

    command: _Command
    stop_command: _Command | None = None
    env: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str] = {}
    gpus: list[NonNegativeInt] | None = None
    ready: Annotated[Text, Field(pattern="^/")] | None = None
    start_timeout_s: float = Field(600.0, gt=0, lt=1e6)
    stop_timeout_s: float = Field(10.0, ge=0, le=600)
    sleep: Literal[0, 1, 2] = 0

    @field_validator("sleep")
    @classmethod
    def _is_vllms(cls, level: int, info: ValidationInfo) -> int:
        if level and info.data.get("flavor") != "vllm":
            raise ValueError("only a server with the flavor vllm can sleep")
        return level
