"""The presets of the playground: those of a user, and those that others share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from django.db.models import Q, QuerySet
from pydantic import Field
from rest_framework.request import Request
from rest_framework.response import Response

from inference_site.api.authentication import StaffSession
from inference_site.api.payload import WireRequest, parse
from inference_site.api.views import ApiView
from inference_site.console.playground.models import LONGEST_CONTENT, LONGEST_NAME, Preset
from inference_site.errors.api_errors import ConflictError, NotFoundError

MOST = 200
"""The most presets that one user may have."""
_MOST_SHOWN = 1_000
_DELETE = "playground.delete_preset"
_NONE = "There is no such preset for you."
_TEXT = r"^[^\x00]*$"  # PostgreSQL takes no NUL.


class PresetRequest(WireRequest):
    """The body of ``POST /admin/playground/presets``."""

    kind: Literal["instructions", "tools", "schema"]
    name: Annotated[str, Field(min_length=1, max_length=LONGEST_NAME, pattern=_TEXT)]
    content: Annotated[str, Field(min_length=1, max_length=LONGEST_CONTENT, pattern=_TEXT)]
    is_shared: bool = False


class PresetsView(ApiView):
    """``/admin/playground/presets``."""

    authentication_classes = (StaffSession,)
    permission_classes = ()  # No key calls, so there is no scope to check.

    def get(self, request: Request) -> Response:
        """List the user's own presets and those that are shared, without their content."""
        user = request.user
        found = _seen(user).select_related("user").defer("content")
        return Response({"data": [_listed(preset, user) for preset in found[:_MOST_SHOWN]]})

    def post(self, request: Request) -> Response:
        """Save a preset; one of the same kind and name is replaced."""
        body = parse(PresetRequest, request.data)
        user: Any = request.user  # Of the staff: ``StaffSession`` lets nobody else in.
        own = Preset.objects.filter(user_id=user.pk)
        if own.exclude(kind=body.kind, name=body.name).count() >= MOST:
            raise ConflictError(f"You have {MOST} presets: delete one first.")
        preset, _ = Preset.objects.update_or_create(
            user_id=user.pk,
            kind=body.kind,
            name=body.name,
            defaults={"content": body.content, "is_shared": body.is_shared},
        )
        return Response({**_listed(preset, user), "content": preset.content})


class PresetView(ApiView):
    """``/admin/playground/presets/{id}``."""

    authentication_classes = (StaffSession,)
    permission_classes = ()  # No key calls, so there is no scope to check.

    def get(self, request: Request, pk: int) -> Response:
        """Get a preset with its content."""
        preset = _seen(request.user).select_related("user").filter(pk=pk).first()
        if preset is None:
            raise NotFoundError(_NONE)
        return Response({**_listed(preset, request.user), "content": preset.content})

    def delete(self, request: Request, pk: int) -> Response:
        """Delete an own preset; with the permission, also one that another user shares."""
        deleted, _ = _deletable(request.user).filter(pk=pk).delete()
        if not deleted:
            raise NotFoundError(_NONE)
        return Response({"id": pk, "deleted": True})


def _seen(user: Any) -> QuerySet[Preset]:
    return Preset.objects.filter(Q(user_id=user.pk) | Q(is_shared=True))


def _deletable(user: Any) -> QuerySet[Preset]:
    own = Q(user_id=user.pk)
    return Preset.objects.filter(own | Q(is_shared=True) if user.has_perm(_DELETE) else own)


def _listed(preset: Preset, user: Any) -> dict[str, Any]:
    is_own = preset.user_id == user.pk
    return {
        "id": preset.pk,
        "kind": preset.kind,
        "name": preset.name,
        "is_shared": preset.is_shared,
        "owner": "" if is_own else preset.user.get_username(),
        "may_delete": is_own or user.has_perm(_DELETE),
    }
