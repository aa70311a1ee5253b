"""Admin of responses and conversations: read-only."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.http import HttpRequest
from unfold.admin import TabularInline

from responses_api.models import Conversation, Item, StoredResponse
from worker.admin.keyset import KeysetAdmin


class ItemInline(TabularInline):
    """The items of a response."""

    model = Item
    fields = ("position", "public_id", "is_output", "data")
    ordering = ("position",)
    extra = 0
    can_delete = False

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


@admin.register(StoredResponse)
class StoredResponseAdmin(KeysetAdmin):
    """Responses with their items."""

    list_display = ("public_id", "created_at", "project", "model", "status", "background")
    list_filter = ("status", "background", "project")
    raw_id_fields = ("previous", "conversation")
    inlines = (ItemInline,)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False  # Others may build on it; the API knows how to hide it.


@admin.register(Conversation)
class ConversationAdmin(KeysetAdmin):
    """Conversations."""

    list_display = ("public_id", "created_at", "project", "metadata", "next_position")
    list_filter = ("project",)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False
