"""Keeps the content of one run. What cannot be kept is logged and changes nothing else."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import islice

import django.db

from inference_site.domain.deltas import Delta, TextDelta, ToolCallDelta
from inference_site.domain.messages import Message, TextPart
from inference_site.domain.request import GenerationRequest
from inference_site.kept_content.models import KeptContent
from inference_site.site_settings.current import site_settings
from inference_site.storage.fields import replace_nul
from inference_site.storage.postgresql import release_connection_after, transaction_with_timeouts

logger = logging.getLogger(__name__)

MOST_CHARACTERS = 20_000
"""Of a prompt and of an answer."""
MOST_TURNS = 200
"""Of a prompt: turns without text would have no bound."""


class Keeper:
    """Takes the deltas of an answer, and stores them with the prompt."""

    def __init__(self, public_id: str, request: GenerationRequest) -> None:
        self._public_id = public_id
        self._prompt = _prompt(request)
        self._answer: list[str] = []
        self._room = MOST_CHARACTERS

    def take(self, delta: Delta) -> None:
        """Keep the text of a delta while there is room."""
        match delta:
            case TextDelta(text):
                self._add(text)
            case ToolCallDelta():
                self._add(f"\n{delta.name}: " if delta.name else "")
                self._add(delta.arguments)

    def _add(self, text: str) -> None:
        if text and self._room > 0:
            self._answer.append(text[: self._room])
            self._room -= len(text)

    def save(self) -> None:
        """Store it, if it is still asked for. Never raises, and waits for no lock for long."""
        answer = _clean("".join(self._answer))
        try:
            with release_connection_after():
                if not site_settings().debug_content_hours:
                    return
                self._write(answer)
        except django.db.Error as exc:
            logger.warning("generation %s: its content is not kept: %s", self._public_id, exc)

    def _write(self, answer: str) -> None:
        with transaction_with_timeouts():
            KeptContent.objects.update_or_create(
                public_id=self._public_id, defaults={"prompt": self._prompt, "answer": answer}
            )


def keeper_for(public_id: str, request: GenerationRequest) -> Keeper | None:
    """Return what keeps the content of a run that is not stored; None if nothing is to be kept."""
    with release_connection_after():
        hours = site_settings().debug_content_hours
    return Keeper(public_id, request) if hours else None


def _prompt(request: GenerationRequest) -> list[dict[str, str]]:
    """Return the latest turns that fit; the first of them may be cut."""
    room, turns = MOST_CHARACTERS, []
    for role, text in islice(_turns(request), MOST_TURNS):
        turns.append({"role": role, "content": _clean(text[-room:])})
        room -= len(text)
        if room <= 0:
            break
    return turns[::-1]


def _turns(request: GenerationRequest) -> Iterator[tuple[str, str]]:
    """Yield roles and texts, the latest first."""
    for message in reversed(request.messages):
        yield message.role, _text(message)
    for prompt in reversed(request.prompts):
        yield "user", prompt if isinstance(prompt, str) else f"{len(prompt)} tokens"


def _text(message: Message) -> str:
    calls = "".join(f"\n{call.name}: {call.arguments}" for call in message.tool_calls)
    parts = (part.text if isinstance(part, TextPart) else "[media]" for part in message.parts)
    return (message.text or "") + "".join(parts) + calls


def _clean(text: str) -> str:
    """Return a text that PostgreSQL takes: without NUL and lone surrogates."""
    cleaned: str = replace_nul(text)
    return cleaned.encode("utf-8", "replace").decode()
