"""The export of a project: its stored objects as lines of JSON, which another site can import.

An export is a folder. ``objects.jsonl`` has one object a line: first an ``ExportStart``, then the
objects in an order in which each comes after those that it refers to, then an ``ExportEnd`` with
their numbers, so that a cut file is noticed. ``files/`` has the content of each file under its id.
Ids are kept; primary keys, credentials and sealed content are not in it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, TypeVar

from django.apps import apps
from django.db.models import Model, QuerySet
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

VERSION = 1
LINES_FILE, FILES_FOLDER = "objects.jsonl", "files"

Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Money = Annotated[Decimal, Field(ge=0, max_digits=18, decimal_places=9)]
Id = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class Line(BaseModel):
    """Base of the lines; ``kind`` says which model a line has."""

    model_config = ConfigDict(extra="forbid")
    kind: str


class ObjectLine(Line):
    """Base of the lines of objects with an id of the API."""

    id: Id


class ExportStart(Line):
    """The first line."""

    kind: Literal["export"] = "export"
    version: int
    project: str
    exported_at: AwareDatetime


class ExportEnd(Line):
    """The last line; ``counts`` has the number of objects by kind."""

    kind: Literal["end"] = "end"
    counts: dict[str, int]


class Refused(Exception):
    """The object with this id cannot be imported."""

    def __init__(self, public_id: str, reason: str) -> None:
        self.public_id = public_id
        super().__init__(reason)


class Transfer(Protocol):
    """A module that an app names in ``transfer``: it exports and imports its objects."""

    LINES: Mapping[str, type[ObjectLine]]
    """The models of its lines, by kind, in the order of the export."""

    def export_lines(self, project_id: int, folder: Path) -> Iterator[ObjectLine]:
        """Yield the objects of a project, reading few at a time."""

    def import_lines(
        self, project_id: int, kind: str, lines: Sequence[ObjectLine], folder: Path
    ) -> int:
        """Store these objects unless the project has them; return how many were new.

        All are stored or none, but for files, which are stored one by one. Raise Refused for an
        id that another project has, and for an object that refers to one that the project lacks.
        """


@cache
def transfers() -> Collection[Transfer]:
    """Return these modules of all apps."""
    named: list[Any] = [getattr(config, "transfer", None) for config in apps.get_app_configs()]
    return [import_module(name) for name in named if name]


Row = TypeVar("Row", bound=Model)


def each(rows: QuerySet[Row], batch: int) -> Iterator[Row]:
    """Yield the rows in the order of their primary keys, read by a query for each batch.

    So no cursor is open for as long as an export takes.
    """
    after = 0
    while found := list(rows.filter(pk__gt=after).order_by("pk")[:batch]):
        yield from found
        after = found[-1].pk


def known_ids(model: type[Model], project_id: int, ids: Collection[str]) -> set[str]:
    """Return the ids that the project has. Raise Refused for one of another project."""
    found = model._default_manager.filter(public_id__in=ids)
    owners = dict(found.values_list("public_id", "project_id"))
    for public_id, owner in owners.items():
        if owner != project_id:
            raise Refused(public_id, f"another project has an object with the id {public_id}")
    return set(owners)
