"""Presets: texts that users of the playground have saved under a name."""

from __future__ import annotations

from django.conf import settings
from django.db import models

LONGEST_NAME, LONGEST_CONTENT = 60, 50_000


class PresetKind(models.TextChoices):
    """The field of the page that a preset fills."""

    INSTRUCTIONS = "instructions", "system prompt"
    TOOLS = "tools", "tools"  # A JSON list of tools.
    SCHEMA = "schema", "JSON schema"


class Preset(models.Model):
    """A system prompt, a list of tools or a JSON schema.

    Only the user who saved it can use it, unless it is shared: then all staff can.
    """

    user = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="playground_presets"
    )
    kind = models.CharField(max_length=16, choices=PresetKind.choices)
    name = models.CharField(max_length=LONGEST_NAME)
    content = models.TextField(max_length=LONGEST_CONTENT)
    is_shared = models.BooleanField(default=False, db_default=False)

    class Meta:
        ordering = ["name", "id"]
        constraints = [
            models.UniqueConstraint(fields=["user", "kind", "name"], name="preset_name_once")
        ]

    def __str__(self) -> str:
        return self.name
