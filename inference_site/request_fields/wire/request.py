"""Fields that requests of chat completions and of responses share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def _stop_kind(value: object) -> str:
    return "texts" if isinstance(value, list) else "text"


_StopText = Annotated[str, Field(min_length=1)]


StopTexts = Annotated[
    Annotated[_StopText, Tag("text")]
    | Annotated[list[_StopText], Field(max_length=4), Tag("texts")],
    Discriminator(_stop_kind),
]

ManyStopTexts = Annotated[
    Annotated[_StopText, Tag("text")]
    | Annotated[list[_StopText], Field(max_length=16), Tag("texts")],
    Discriminator(_stop_kind),
]
"""Of endpoints whose clients send more than OpenAI's four: evaluation harnesses, Ollama's."""


Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=64)],
        Annotated[str, Field(max_length=512)],
    ],
    Field(max_length=16),
]


ServiceTier = Literal["auto", "default", "flex", "scale", "priority"]
"""``flex`` waits behind all others; the rest are one."""


EndUser = Annotated[str, Field(max_length=512, pattern=r"^[^\x00]*$")]
"""Who the caller asks for; kept on the generation, where PostgreSQL takes no NUL."""
