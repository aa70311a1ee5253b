"""The base of every ``ModelAdmin``: lists filter by what they declare, and by nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.http import HttpRequest
from unfold.admin import ModelAdmin

from inference_site.admin_pages.changes import form_changes, formset_changes

_PARAMETERS = ("", "__exact", "__isnull", "__isempty", "__id__exact")
"""What Django's filters append to the name of their field."""


class SiteAdmin(ModelAdmin):
    """Base of the admin of every model; ``how_to_add`` is what an empty list says."""

    how_to_add = ""

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        """Return whether a parameter of the address belongs to a filter of the list.

        Django allows every lookup of the model's own fields. With ``field__startswith`` a user
        reads a field letter by letter, and with ``json__key__startswith`` what is in it, although
        no page shows it to them.
        """
        filters = self.list_filter if request is None else self.get_list_filter(request)
        return lookup in _declared(filters)

    def construct_change_message(
        self, request: HttpRequest, form: Any, formsets: Any, add: bool = False
    ) -> Any:
        """Return what the audit log says of a change: old and new values, without secrets."""
        if add:
            return super().construct_change_message(request, form, formsets, add)
        told = form_changes(form)
        for formset in formsets or ():
            told += formset_changes(formset)
        return "; ".join(told) or "No changes."


def _declared(filters: Sequence[Any]) -> Iterator[str]:
    """Yield the parameters of these filters."""
    for one in filters:
        if hasattr(one, "parameter_name"):  # A SimpleListFilter.
            yield one.parameter_name
        else:
            path = one if isinstance(one, str) else one[0]
            yield from (f"{path}{ending}" for ending in _PARAMETERS)
