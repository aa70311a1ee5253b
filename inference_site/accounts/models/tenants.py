"""Projects and API keys: who may use the site, for what and how much, and whose data is whose."""

from __future__ import annotations

from django.conf import settings
from django.contrib.postgres.fields import ArrayField
from django.core.validators import MinValueValidator
from django.db import models
from django.utils import timezone


class Scope(models.TextChoices):
    """What a key opens. Data is always that of its own project, but for ``ADMIN``."""

    INFERENCE = "inference", "inference"  # Generate, and read, change and delete what is stored.
    USAGE = "usage:read", "usage:read"  # The usage of the own project.
    DEBUG = "debug", "debug"  # The prompts that templates render.
    MODELS = "models:write", "models:write"  # Load and unload models, for everybody.
    ADMIN = "admin", "admin"  # The usage of all projects.


def default_scopes() -> list[str]:
    """Return what a key opens if nothing else is said."""
    return [Scope.INFERENCE, Scope.USAGE]


_SOME = [MinValueValidator(1)]


class Limited(models.Model):
    """What holds back a project or a key; empty is no limit."""

    requests_per_minute = models.PositiveIntegerField(null=True, blank=True, validators=_SOME)
    tokens_per_minute = models.PositiveIntegerField(null=True, blank=True, validators=_SOME)
    concurrent_runs = models.PositiveIntegerField(
        null=True, blank=True, validators=_SOME, help_text="Waiting and running, at one time."
    )

    class Meta:
        abstract = True


class Project(Limited):
    """A tenant: every key, generation and stored object belongs to exactly one."""

    name = models.CharField(max_length=100, unique=True)
    is_active = models.BooleanField(
        default=True, help_text="Keys of an inactive project are refused."
    )
    disconnect_grace_s = models.PositiveIntegerField(
        null=True,
        blank=True,
        verbose_name="disconnect grace (s)",
        help_text=(
            "How long a stored response goes on when its client has left, so that it can be "
            "followed again. Empty: what DISCONNECT_GRACE_S says."
        ),
    )
    # That to which the console accounts what the staff try; its name does not tell.
    is_playground = models.BooleanField(default=False, db_default=False, editable=False)
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["name"]
        constraints = [
            models.UniqueConstraint(
                fields=["is_playground"],
                condition=models.Q(is_playground=True),
                name="project_one_playground",
            )
        ]

    def __str__(self) -> str:
        return self.name


class ApiKey(Limited):
    """A credential of one project: what it opens, and how much of it."""

    project = models.ForeignKey(Project, on_delete=models.PROTECT, related_name="api_keys")
    name = models.CharField(max_length=100)
    # Whose key of the playground it is: a session opens it, no secret does.
    user = models.OneToOneField(
        settings.AUTH_USER_MODEL,
        on_delete=models.SET_NULL,
        null=True,
        blank=True,
        editable=False,
        related_name="playground_key",
    )
    # Of the newest secret, for people to see.
    prefix = models.CharField(max_length=16, editable=False)
    scopes = ArrayField(
        models.CharField(max_length=32, choices=Scope.choices), default=default_scopes, blank=True
    )
    allowed_models = ArrayField(
        models.CharField(max_length=200),
        default=list,
        blank=True,
        help_text="Ids of models, with commas between them. Empty: all.",
    )
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    expires_at = models.DateTimeField(null=True, blank=True)
    # To the minute: it is written once in a while, not on every request.
    last_used_at = models.DateTimeField(null=True, blank=True, editable=False)
    revoked_at = models.DateTimeField(null=True, blank=True, editable=False)

    class Meta:
        ordering = ["-id"]
        verbose_name = "API key"

    def __str__(self) -> str:
        return f"{self.name} ({self.prefix}…)"


class KeySecret(models.Model):
    """A secret by which a key is known; only its SHA-256 is kept.

    A key has one, and while it is rotated two: the old one is good until ``expires_at``.
    """

    api_key = models.ForeignKey(ApiKey, on_delete=models.CASCADE, related_name="secrets")
    digest = models.CharField(max_length=64, unique=True)
    created_at = models.DateTimeField(default=timezone.now)
    expires_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["api_key"],
                condition=models.Q(expires_at__isnull=True),
                name="key_secret_one_current",
            )
        ]

    def __str__(self) -> str:
        return f"of key {self.api_key_id}"
