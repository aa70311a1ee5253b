"""Export and import of stored chat completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import AwareDatetime, Field

from completions.models import StoredCompletion
from completions.storage import wire_messages
from inference_site.core.transfer import ObjectLine, Refused, each, known_ids
from inference_site.gateway.feedback_views import FeedbackEntry

_BATCH = 100


class CompletionLine(ObjectLine):
    """A stored chat completion with its messages."""

    kind: Literal["chat_completion"] = "chat_completion"
    model: Annotated[str, Field(max_length=200)]
    metadata: dict[str, Any]
    messages: list[dict[str, Any]]
    completion: dict[str, Any]
    streamed: dict[str, Any] | None
    rating: Literal["", "up", "down"] = ""
    feedback: list[FeedbackEntry] = []
    created_at: AwareDatetime


LINES = {"chat_completion": CompletionLine}
_COLUMNS = tuple(CompletionLine.model_fields.keys() - {"kind", "id", "feedback"})


def export_lines(project_id: int, folder: Path) -> Iterator[CompletionLine]:
    """Yield the stored completions; see ``inference_site.core.transfer.Transfer``."""
    del folder
    for stored in each(StoredCompletion.objects.filter(project=project_id), _BATCH):
        columns = {name: getattr(stored, name) for name in _COLUMNS}
        yield CompletionLine(id=stored.public_id, feedback=stored.feedback, **columns)


def import_lines(project_id: int, kind: str, lines: Sequence[ObjectLine], folder: Path) -> int:
    """Store completions; see ``inference_site.core.transfer.Transfer``."""
    del kind, folder
    known = known_ids(StoredCompletion, project_id, [line.id for line in lines])
    new = [line for line in cast(Sequence[CompletionLine], lines) if line.id not in known]
    rows = [
        StoredCompletion(
            public_id=line.id,
            project_id=project_id,
            **{name: getattr(line, name) for name in _COLUMNS},
            feedback=[entry.model_dump() for entry in line.feedback],
        )
        for line in new
    ]
    for row in rows:
        try:
            wire_messages(row)
        except (AttributeError, KeyError, TypeError) as exc:
            reason = f"the messages of {row.public_id} cannot be read: {exc}"
            raise Refused(row.public_id, reason) from exc
    StoredCompletion.objects.bulk_create(rows)
    return len(rows)
