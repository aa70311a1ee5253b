"""Whether a wait is over whose end is a time in a row."""

from __future__ import annotations

import datetime as dt

from django.db.models import Q
from django.db.models.functions import Now

_LONGEST_TRANSACTION = dt.timedelta(minutes=1)
"""``Now()`` is the beginning of a transaction: one that began later has written a later end."""


def is_over(end: str, longest: dt.timedelta) -> Q:
    """Return the condition that the wait that ends at the time in the field ``end`` is over.

    The clock is that of the database. Its host may be set back, and then waits would take hours
    longer: an end that is further ahead than the ``longest`` wait was written before that, and is
    over. None is no wait.
    """
    possible = longest + _LONGEST_TRANSACTION
    is_past, was_set_back = Q(**{f"{end}__lte": Now()}), Q(**{f"{end}__gt": Now() + possible})
    return Q(**{end: None}) | is_past | was_set_back
