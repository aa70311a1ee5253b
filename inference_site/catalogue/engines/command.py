"""The options of a model whose server the worker starts with a command of the models file."""

from __future__ import annotations

import shlex
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, ValidationInfo, field_validator

from inference_site.catalogue.engines.openai_upstream import ServerOptions
from inference_site.catalogue.operator_settings import Text, TextOrNumber

PLACEHOLDERS = ("api_key", "file", "gpus", "host", "id", "models_dir", "port", "socket")


def split_command(command: str, values: dict[str, str]) -> list[str]:
    """Return the words of a command, split as a shell does, with their placeholders filled in.

    No shell runs it. Raise ValueError for quotes that do not close and for unknown placeholders.
    """
    try:
        return [word.format_map(values) for word in shlex.split(command)]
    except (KeyError, IndexError, AttributeError) as exc:
        known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
        raise ValueError(f"has an unknown placeholder, {exc}; there are {known}") from exc
    except ValueError as exc:
        raise ValueError(f"cannot be read: {exc}") from exc


def _check_command(command: str) -> str:
    if not split_command(command, dict.fromkeys(PLACEHOLDERS, "")):
        raise ValueError("is empty")
    return command


_Command = Annotated[TextOrNumber, AfterValidator(_check_command)]


class CommandOptions(ServerOptions):
    """How the worker starts, stops and calls the server; see docs/engines.md.

    ``ready`` is the path that answers with status 200 once the server accepts requests; the default
    is the flavor's. ``gpus`` are the numbers of the GPUs that the server may see. ``sleep`` is
    vLLM's sleep level: when the worker evicts the model, its server sleeps instead of ending.
    """

    command: _Command
    stop_command: _Command | None = None
    env: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], TextOrNumber] = {}
    gpus: list[NonNegativeInt] | None = None
    ready: Annotated[Text, Field(pattern="^/")] | None = None
    start_timeout_s: float = Field(600.0, gt=0, lt=1e6)
    stop_timeout_s: float = Field(10.0, ge=0, le=600)
    sleep: Literal[0, 1, 2] = 0

    @field_validator("sleep")
    @classmethod
    def _only_vllm_sleeps(cls, level: int, info: ValidationInfo) -> int:
        if level and info.data.get("flavor") != "vllm":
            raise ValueError("only a server with the flavor vllm can sleep")
        return level
