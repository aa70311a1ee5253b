"""Search: the text of an item, as its index and queries both write it."""

from __future__ import annotations

from django.contrib.postgres.search import SearchQuery, SearchVector
from django.db.models import TextField, Value
from django.db.models.functions import Cast, Left, Replace

_SEARCHED = 20_000
"""Characters of an item that are searched: PostgreSQL refuses to index more than a mebibyte."""


def item_text() -> SearchVector:
    """Return the words of an item, without regard to any language.

    They are those of its JSON, in which a line break is two characters.
    """
    encoded = Left(Cast("data", TextField()), _SEARCHED)
    return SearchVector(Replace(encoded, Value(r"\n"), Value(" ")), config="simple")


def words(text: str) -> SearchQuery:
    """Return the query for items that have all of these words."""
    return SearchQuery(text, config="simple", search_type="plain")
