"""Fields of tools that chat completions and responses share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from inference_site.api.payload import WireRequest

FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class CustomFormat(WireRequest):
    """``tools[].custom.format``: free text. Grammars for custom tools are not honoured."""

    type: Literal["text"]
