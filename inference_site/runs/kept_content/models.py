"""Kept content: prompts and answers of requests with ``store: false``, for debugging.

A failure to store them is logged and does not change the run.
"""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Mapping, Sequence
from itertools import chain, islice

import django.db
from django.db import models
from django.utils import timezone

from inference_site.core.domain.deltas import Delta, RefusalDelta, TextDelta, ToolCallDelta
from inference_site.core.domain.request import GenerationRequest, Message, TextPart
from inference_site.core.site_settings.models import site_settings
from inference_site.core.storage.fields import ContentField, replace_nul
from inference_site.core.storage.old_rows import delete_older
from inference_site.core.storage.postgresql import (
    release_connection_after,
    transaction_with_timeouts,
)

logger = logging.getLogger(__name__)

MAX_CHARACTERS = 20_000
"""Characters of a prompt, and of an answer."""
MAX_TURNS = 200
"""Turns of a prompt; turns without text do not count as characters."""
_DELETE_BATCH = 500


def kept_since() -> dt.datetime:
    """Return the time before which kept content has expired; now, if the setting is off."""
    hours = site_settings().debug_content_hours or 0
    return timezone.now() - dt.timedelta(hours=hours)


class KeptContentQuerySet(models.QuerySet["KeptContent"]):
    """Rows of kept content; expired rows may not have been deleted yet."""

    def shown(self) -> KeptContentQuerySet:
        """Return the rows that may be shown: those that have not expired."""
        return self.filter(created_at__gt=kept_since())


class KeptContent(models.Model):
    """Prompt and answer of one generation, shortened.

    ``prompt`` is a list of objects with ``role`` and ``content``: the newest turns that fit.
    """

    public_id = models.CharField("ID", max_length=64, unique=True)
    prompt = ContentField(default=list)
    answer = models.TextField(blank=True, default="")
    created_at = models.DateTimeField(default=timezone.now)

    objects = KeptContentQuerySet.as_manager()

    def __str__(self) -> str:
        return self.public_id


class Keeper:
    """Collects the deltas of an answer, and stores them with the prompt when the run has ended."""

    def __init__(self, public_id: str, request: GenerationRequest) -> None:
        self._public_id = public_id
        self._prompt = _newest_turns(request)
        self._answer: list[str] = []
        self._room = MAX_CHARACTERS

    def take(self, delta: Delta) -> None:
        """Append the text of a delta, up to ``MAX_CHARACTERS``."""
        match delta:
            case TextDelta(text) | RefusalDelta(text):
                self._append(text)
            case ToolCallDelta():
                self._append(f"\n{delta.name}: " if delta.name else "")
                self._append(delta.arguments)

    def _append(self, text: str) -> None:
        if text and self._room > 0:
            self._answer.append(text[: self._room])
            self._room -= len(text)

    def save(self) -> None:
        """Store prompt and answer if the setting is still on; log errors of the database.

        It waits for no lock for long.
        """
        stored = {"prompt": self._prompt, "answer": _storable_text("".join(self._answer))}
        try:
            with release_connection_after():
                if site_settings().debug_content_hours:
                    with transaction_with_timeouts():
                        KeptContent.objects.update_or_create(
                            public_id=self._public_id, defaults=stored
                        )
        except django.db.Error as exc:
            logger.warning("generation %s: its content is not kept: %s", self._public_id, exc)


def keeper_for(public_id: str, request: GenerationRequest) -> Keeper | None:
    """Return the keeper for a run that is not stored; None if the setting is off."""
    with release_connection_after():
        hours = site_settings().debug_content_hours
    return Keeper(public_id, request) if hours else None


def _newest_turns(request: GenerationRequest) -> list[dict[str, str]]:
    """Return the newest turns that fit, oldest first; the first one may lack its beginning."""
    # Generators: the text of a turn that does not fit is not built.
    messages = ((message.role, _message_text(message)) for message in reversed(request.messages))
    prompts = (
        ("user", prompt if isinstance(prompt, str) else f"{len(prompt)} tokens")
        for prompt in reversed(request.prompts)
    )
    room, newest = MAX_CHARACTERS, []
    for role, text in islice(chain(messages, prompts), MAX_TURNS):
        newest.append({"role": role, "content": _storable_text(text[-room:])})
        room -= len(text)
        if room <= 0:
            break
    return newest[::-1]


def _message_text(message: Message) -> str:
    calls = "".join(f"\n{call.name}: {call.arguments}" for call in message.tool_calls)
    parts = (part.text if isinstance(part, TextPart) else "[media]" for part in message.parts)
    return (message.text or "") + "".join(parts) + calls


def _storable_text(text: str) -> str:
    """Replace NUL and lone surrogates, which PostgreSQL does not take."""
    cleaned: str = replace_nul(text)
    return cleaned.encode("utf-8", "replace").decode()


def prune(until: float) -> int:
    """Delete rows past their hours, oldest first, and all rows while the setting is off.

    Stop when the monotonic clock passes ``until``; return the number of deleted rows.
    """
    return delete_older(KeptContent.objects.all(), kept_since(), until, _DELETE_BATCH)


def forget(
    end_user: str, project_id: int | None, generation_ids: Sequence[str]
) -> Mapping[str, int]:
    """Delete the kept content of generations (see ``inference_site.runs.kinds.Forgetting``)."""
    deleted, _ = KeptContent.objects.filter(public_id__in=generation_ids).delete()
    return {"kept contents": deleted}
