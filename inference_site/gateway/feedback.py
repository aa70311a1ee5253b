"""Feedback on stored answers: a rating and a note of each author. An extension of the API.

The row of the answer has it, so it is deleted, retained, exported and imported with the answer. An
author is a user of the console, by name, or the project's clients together (``CLIENTS``).
"""

from __future__ import annotations

from typing import Any, TypeVar

from django.db import models, transaction
from django.utils import timezone

from inference_site.core.errors.api_errors import InvalidRequestError, NotFoundError
from inference_site.core.storage.fields import ContentField

LONGEST_NOTE = 4_000
MAX_AUTHORS = 100
"""Authors who may give feedback on one answer."""
CLIENTS = "client"
_STAFF = "staff:"


class Rating(models.TextChoices):
    """What an author thinks of an answer."""

    UP = "up", "good"
    DOWN = "down", "bad"


class Rated(models.Model):
    """Base of stored answers.

    ``feedback`` has an entry of each author, oldest first: ``author``, ``rating``, ``note`` and
    ``created_at``, a Unix time. ``rating`` is that of the newest one, "" without any.
    """

    rating = models.CharField(
        max_length=4, choices=Rating.choices, blank=True, default="", db_default=""
    )
    feedback = ContentField(default=list, db_default=[], blank=True)

    class Meta:
        abstract = True


AnswerT = TypeVar("AnswerT", bound=Rated)


def staff_author(user: Any) -> str:
    """Return the author that a user of the console is."""
    return f"{_STAFF}{user.get_username()}"


def give(answer: Rated, author: str, rating: Rating, note: str) -> dict[str, Any]:
    """Store the feedback of an author in place of an earlier one, and return its entry.

    Raise InvalidRequestError if too many authors have given feedback, NotFoundError if the answer
    was deleted meanwhile.
    """
    now = int(timezone.now().timestamp())
    entry = {"author": author, "rating": rating.value, "note": note, "created_at": now}
    with transaction.atomic():
        others = [one for one in _locked(answer).feedback if one["author"] != author]
        if len(others) >= MAX_AUTHORS:
            raise InvalidRequestError(f"{MAX_AUTHORS} authors have given feedback already.")
        _store(answer, [*others, entry])
    return entry


def withdraw(answer: Rated, author: str) -> bool:
    """Delete the feedback of an author; return whether there was one. Raise NotFoundError."""
    with transaction.atomic():
        found = _locked(answer).feedback
        others = [one for one in found if one["author"] != author]
        _store(answer, others)
    return len(others) < len(found)


def _locked(answer: AnswerT) -> AnswerT:
    rows = type(answer)._default_manager.select_for_update()
    found = rows.filter(pk=answer.pk).first()
    if found is None:
        raise NotFoundError("The answer was deleted.")
    return found


def _store(answer: Rated, entries: list[dict[str, Any]]) -> None:
    rows = type(answer)._default_manager.filter(pk=answer.pk)
    rows.update(feedback=entries, rating=entries[-1]["rating"] if entries else "")
