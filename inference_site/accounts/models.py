"""Projects (tenants) and API keys with their scopes, limits, budgets and retention."""

from __future__ import annotations

import datetime as dt
import math
import random
import time
from collections.abc import Iterator
from decimal import Decimal

from django.conf import settings
from django.contrib.postgres.fields import ArrayField
from django.core.validators import MinValueValidator
from django.db import models
from django.utils import timezone

from inference_site.core.admin_pages.labels import money
from inference_site.core.site_settings.models import (
    LONGEST_TAG,
    RetentionKind,
    retention_days,
    retention_field,
)


class Scope(models.TextChoices):
    """What a key may do. All scopes but ``MODELS`` and ``ADMIN`` cover the key's project only."""

    INFERENCE = "inference", "inference"  # Generate; read, change and delete stored objects.
    USAGE = "usage:read", "usage:read"  # Read the usage of the key's project.
    DEBUG = "debug", "debug"  # Render chat templates to prompts.
    MODELS = "models:write", "models:write"  # Load, unload, pull: for the whole site.
    ADMIN = "admin", "admin"  # Read the usage of all projects, and change projects and keys.


def default_scopes() -> list[str]:
    """Return the scopes of a key that is created without naming any."""
    return [Scope.INFERENCE, Scope.USAGE]


_RETENTION_HELP = "0: until they are deleted. Empty: as the site's settings say."
_AT_LEAST_ONE = [MinValueValidator(1)]


LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrent_runs")
"""The fields of ``Limited``."""


class Limited(models.Model):
    """Limits of a project or a key; an empty field means no limit."""

    requests_per_minute = models.PositiveIntegerField(
        null=True, blank=True, validators=_AT_LEAST_ONE
    )
    tokens_per_minute = models.PositiveIntegerField(null=True, blank=True, validators=_AT_LEAST_ONE)
    concurrent_runs = models.PositiveIntegerField(
        null=True,
        blank=True,
        validators=_AT_LEAST_ONE,
        help_text="Waiting and running generations at one time.",
    )

    class Meta:
        abstract = True


class Project(Limited):
    """A tenant: every key, generation and stored object belongs to exactly one project."""

    name = models.CharField(max_length=100, unique=True)
    is_active = models.BooleanField(
        default=True, help_text="Keys of an inactive project are refused."
    )
    disconnect_grace_s = models.PositiveIntegerField(
        null=True,
        blank=True,
        verbose_name="disconnect grace (s)",
        help_text=(
            "How long a stored response continues after its client has disconnected, so that a "
            "client can read it again. Leave empty to use that of the site's settings."
        ),
    )
    mcp_hosts = ArrayField(
        models.CharField(max_length=253),
        default=list,
        db_default=[],
        blank=True,
        verbose_name="hosts of MCP servers",
        help_text=(
            "Hosts, separated by commas, whose MCP servers requests may name by a URL; "
            ".example.org includes all names below it. Leave empty for all that the site allows."
        ),
    )
    allowed_models = ArrayField(
        models.CharField(max_length=200),
        default=list,
        db_default=[],
        blank=True,
        help_text="Model ids, separated by commas. Leave empty to allow all models.",
    )
    members = models.ManyToManyField(
        settings.AUTH_USER_MODEL,
        blank=True,
        related_name="projects",
        verbose_name="users with keys of their own",
        help_text=(
            "These users may make keys for themselves, within the limits of the project, if their "
            "role may too. Who is removed keeps the keys that there are, until they are revoked."
        ),
    )
    responses_days = retention_field("responses (days)", _RETENTION_HELP, 0)
    conversations_days = retention_field("conversations (days)", _RETENTION_HELP, 0)
    completions_days = retention_field("chat completions (days)", _RETENTION_HELP, 0)
    files_days = retention_field("files (days)", _RETENTION_HELP, 0)
    batches_days = retention_field("batches (days)", _RETENTION_HELP, 0)
    generations_days = retention_field("generations (days)", _RETENTION_HELP, 0)
    refusals_days = retention_field("refused requests (days)", _RETENTION_HELP, 0)
    # The one project to which the playground's usage is accounted, whatever its name.
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
    """A credential of one project, with scopes and limits."""

    project = models.ForeignKey(Project, on_delete=models.PROTECT, related_name="api_keys")
    name = models.CharField(max_length=100)
    # Set for playground keys only: the user's session replaces the secret.
    user = models.OneToOneField(
        settings.AUTH_USER_MODEL,
        on_delete=models.SET_NULL,
        null=True,
        blank=True,
        editable=False,
        related_name="playground_key",
    )
    # Set for a key that a user made for themselves; it works while the user is active.
    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        on_delete=models.PROTECT,
        null=True,
        blank=True,
        editable=False,
        related_name="own_keys",
    )
    # The first characters of the newest secret, for display.
    prefix = models.CharField(max_length=16, editable=False)
    scopes = ArrayField(
        models.CharField(max_length=32, choices=Scope.choices),
        verbose_name="permissions",
        default=default_scopes,
        blank=True,
    )
    allowed_models = ArrayField(
        models.CharField(max_length=200),
        default=list,
        blank=True,
        help_text="Model ids, separated by commas. Leave empty to allow all models.",
    )
    priority_requests_per_minute = models.PositiveIntegerField(
        null=True,
        blank=True,
        validators=_AT_LEAST_ONE,
        help_text=(
            'Requests for the service tier "priority" that are served before others; more are '
            "served as usual. Leave empty for none."
        ),
    )
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    expires_at = models.DateTimeField(null=True, blank=True)
    # Written at most once a minute.
    last_used_at = models.DateTimeField(null=True, blank=True, editable=False)
    revoked_at = models.DateTimeField(null=True, blank=True, editable=False)

    class Meta:
        ordering = ["-id"]
        verbose_name = "API key"
        permissions = [("make_own_key", "Can make keys of their own")]

    def __str__(self) -> str:
        return f"{self.name} ({self.prefix}…)"


class ModelLimit(Limited):
    """Limits of a project, or of one of its keys, for one model.

    Requests to the model count here and in the limits for all models.
    """

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="model_limits")
    api_key = models.ForeignKey(
        ApiKey,
        on_delete=models.CASCADE,
        related_name="model_limits",
        null=True,
        blank=True,
        verbose_name="API key",
        help_text="Leave empty to count all keys of the project together.",
    )
    # Its id, whether the catalogue has it or not.
    model = models.CharField(max_length=200)

    class Meta:
        verbose_name = "limit of a model"
        verbose_name_plural = "limits of models"
        default_permissions = ()  # Those of the project.
        constraints = [
            models.UniqueConstraint(
                fields=["project", "api_key", "model"],
                nulls_distinct=False,
                name="model_limit_once",
            ),
        ]

    def __str__(self) -> str:
        amounts = ((getattr(self, name), name.replace("_", " ")) for name in LIMITS)
        limits = ", ".join(f"{name} {amount:,}" for amount, name in amounts if amount is not None)
        return f"{self.model}: {limits or 'no limit'}"


class KeySecret(models.Model):
    """A secret of a key, stored as its SHA-256 only.

    A key has one secret; during a rotation two, of which the old one is valid until ``expires_at``.
    """

    api_key = models.ForeignKey(ApiKey, on_delete=models.CASCADE, related_name="secrets")
    digest = models.CharField(max_length=64, unique=True)
    created_at = models.DateTimeField(default=timezone.now)
    expires_at = models.DateTimeField(null=True, blank=True)
    # Written at most once a minute.
    last_used_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["api_key"],
                condition=models.Q(expires_at__isnull=True),
                name="key_secret_one_current",
            )
        ]

    def __str__(self) -> str:
        return f"Secret of key {self.api_key_id}"


END_USER, TAG = "user", "tag:"
"""The dimension of end users, and the beginning of those of tags, before the metadata key."""
LONGEST_DIMENSION = len(TAG) + LONGEST_TAG


BOUNDED = ("api_key", "model", "each", "unit", "every")
"""The fields of a budget that say what it bounds; a project has one budget of each."""
Bounded = tuple[str, str, str, str]
"""Their values but for the key: ``model``, ``each``, ``unit`` and ``every``."""


class Budget(models.Model):
    """A bound on the usage of a project, or of one of its keys, in a day or month of UTC.

    It counts one model or all. With a dimension in ``each``, each end user or each value of the tag
    has this amount, and requests without one are not bounded.
    """

    class Unit(models.TextChoices):
        TOKENS = "tokens", "tokens"  # Input and output together.
        COST = "cost", "money"  # In the currency of the catalogue's prices.

    class Every(models.TextChoices):
        DAY = "day", "day"
        MONTH = "month", "month"

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="budgets")
    api_key = models.ForeignKey(
        ApiKey,
        on_delete=models.CASCADE,
        related_name="budgets",
        null=True,
        blank=True,
        verbose_name="API key",
        help_text="Leave empty to count all keys of the project together.",
    )
    # Its id, whether the catalogue has it or not; "" for all.
    model = models.CharField(max_length=200, blank=True, default="", db_default="")
    each = models.CharField(
        "for each", max_length=LONGEST_DIMENSION, blank=True, default="", db_default=""
    )
    unit = models.CharField(max_length=8, choices=Unit.choices)
    every = models.CharField(max_length=8, choices=Every.choices)
    amount = models.DecimalField(
        max_digits=20, decimal_places=9, validators=[MinValueValidator(Decimal(0))]
    )
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["project", *BOUNDED],
                nulls_distinct=False,
                name="budget_once",
            ),
            models.CheckConstraint(condition=models.Q(amount__gte=0), name="budget_amount"),
        ]

    def __str__(self) -> str:
        model = f" for the model {self.model}" if self.model else ""
        whose = f" for each {self.shown_each}" if self.each else ""
        return f"{self.shown(self.amount)} a {self.every}{model}{whose}"

    @property
    def shown_each(self) -> str:
        """Return what each has this amount; "" if all requests share it."""
        return "end user" if self.each == END_USER else self.each.removeprefix(TAG)

    def shown(self, amount: Decimal) -> str:
        """Return an amount of this budget with its unit."""
        return money(amount) if self.unit == self.Unit.COST else f"{amount:,.0f} tokens"


class BudgetSpend(models.Model):
    """The amounts spent and reserved of a budget in one of its periods.

    ``value`` is the end user or the value of the tag whose amounts they are; "" for a budget that
    all requests share. Rows with a value are deleted some days after their period.

    The amounts are derived from the usage log; ``manage.py usage --check`` compares them.
    """

    budget = models.ForeignKey(Budget, on_delete=models.CASCADE, related_name="spends")
    start = models.DateField()
    value = models.CharField(max_length=512, blank=True, default="", db_default="")
    spent = models.DecimalField(max_digits=24, decimal_places=9, default=0)
    reserved = models.DecimalField(max_digits=24, decimal_places=9, default=0)

    class Meta:
        indexes = [
            # Alarms read the current periods of all budgets.
            models.Index(
                fields=["start"], condition=models.Q(value=""), name="budget_spend_by_start"
            ),
        ]
        constraints = [
            models.UniqueConstraint(fields=["budget", "start", "value"], name="budget_spend_once"),
        ]

    def __str__(self) -> str:
        return f"{self.budget.shown(self.spent)} since {self.start}"


def retention_cutoffs(
    kind: RetentionKind, until: float = math.inf
) -> Iterator[tuple[int, dt.datetime]]:
    """Yield (project id, cutoff) of each project with a retention; older objects may be deleted.

    None but the first follows once the monotonic clock has passed ``until``. The order is random,
    so that no project is always the last.
    """
    now, site_days = timezone.now(), retention_days(kind)
    rows = list(Project.objects.values_list("pk", kind))
    random.shuffle(rows)
    for pk, own in rows:
        if days := site_days if own is None else own:
            yield pk, now - dt.timedelta(days=days)
            if time.monotonic() >= until:
                return
