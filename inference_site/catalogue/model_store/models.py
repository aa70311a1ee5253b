"""Models, LoRA adapters, orders to workers and pulls in the database."""

from __future__ import annotations

from collections.abc import Collection

from django.conf import settings
from django.core.validators import RegexValidator
from django.db import connection, models, transaction
from django.db.models import Q
from django.db.models.functions import Now
from django.utils import timezone

from inference_site.core.storage.fields import ContentField

MAIN = "main"
"""The default revision of a pull."""
_ID = RegexValidator(
    r"\A\w[\w.:/@+-]*\Z", "Letters and digits, and . : / @ + - _ after the first of them."
)


class StoredModel(models.Model):
    """A model that an operator has added; ``entry`` has the keys of an entry of the models file.

    ``any_address`` allows private addresses of its servers whatever the settings say. Only entries
    that are older than the restriction have it, until they are edited.
    """

    model_id = models.CharField("ID", max_length=200, unique=True, validators=[_ID])
    entry = ContentField(default=dict)
    any_address = models.BooleanField(default=False, db_default=False, editable=False)
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    updated_at = models.DateTimeField(auto_now=True)

    class Meta:
        ordering = ["model_id"]
        verbose_name = "model"

    def __str__(self) -> str:
        return self.model_id


class Adapter(models.Model):
    """A LoRA adapter that was added to a model, and its scale for requests that set none.

    ``file`` is relative to ``MODELS_DIR``. It is empty for an adapter of the model's entry, whose
    row only holds a scale.
    """

    model_id = models.CharField("model", max_length=200)
    name = models.CharField(max_length=200)
    file = models.CharField(max_length=1000, blank=True)
    scale = models.FloatField(default=0.0)
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["model_id", "name"], name="adapter_of_one_name")
        ]

    def __str__(self) -> str:
        return self.name


class OrderState(models.TextChoices):
    """The action of an order: on a model, or on the worker itself."""

    LOADED = "loaded"  # Load the model.
    RELOADED = "reloaded"  # Load the model again, with the adapters that it has now.
    UNLOADED = "unloaded"  # Drop the model once its runs have ended.
    DRAINED = "drained"  # Take no new work.
    ACTIVE = "active"  # Take work again.


class WorkerOrder(models.Model):
    """The last order to a worker about a model, or about itself (see ``fleet.orders``).

    ``model_id`` is empty for an order about the worker itself; ``worker`` is empty for one to all
    workers. ``seen_at`` is the time at which the worker had begun to carry it out.
    """

    worker = models.CharField(max_length=128, blank=True)
    model_id = models.CharField("model", max_length=200, blank=True)
    state = models.CharField(max_length=16, choices=OrderState.choices)
    ordered_at = models.DateTimeField(db_default=Now())
    seen_at = models.DateTimeField(null=True)

    class Meta:
        default_permissions = ()  # No page shows it.
        constraints = [
            models.UniqueConstraint(fields=["worker", "model_id"], name="order_to_worker"),
            models.CheckConstraint(
                condition=models.Q(state__in=OrderState.values), name="order_state_known"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.state} {self.model_id}".strip()


class PullState(models.TextChoices):
    """A pull only moves forward; if its worker dies, another worker continues it."""

    QUEUED = "queued"  # No worker has claimed it yet.
    RUNNING = "running"  # A worker downloads the file.
    COMPLETED = "completed"  # The file is complete and checked.
    FAILED = "failed"  # ``error`` says why.
    CANCELLED = "cancelled"  # An operator stopped it; another pull can resume the download.


UNFINISHED = (PullState.QUEUED, PullState.RUNNING)
MOST_UNFINISHED = 32
"""API keys cannot request another pull beyond this number."""
_LOCK = f"SELECT pg_advisory_xact_lock({0x1F5A0005})"


class TooManyPulls(Exception):
    """``MOST_UNFINISHED`` pulls wait or run."""


class PullQuerySet(models.QuerySet["Pull"]):
    """The transitions of a pull; each is guarded, so that only one process wins."""

    def join(self, reference: str) -> Pull:
        """Return the unfinished pull of this reference that any host may run, or a new one.

        Two callers at the same moment get the same pull. Raise TooManyPulls.
        """
        with transaction.atomic():
            with connection.cursor() as cursor:
                cursor.execute(_LOCK)
            unfinished = self.filter(state__in=UNFINISHED)
            same = unfinished.filter(reference=reference, revision=MAIN, host="").order_by("pk")
            if (pull := same.first()) is not None:
                return pull
            if unfinished.count() >= MOST_UNFINISHED:
                raise TooManyPulls
            return self.create(reference=reference)

    def claim(self, worker: str, host: str, live: Collection[str]) -> Pull | None:
        """Claim the oldest pull that is queued, or whose worker is not among ``live``."""
        worker_died = Q(state=PullState.RUNNING) & ~Q(worker__in=live)
        waiting = self.filter(Q(state=PullState.QUEUED) | worker_died, host__in=("", host))
        with transaction.atomic():
            found = waiting.select_for_update(skip_locked=True).order_by("pk").first()
            if found is not None:
                found.state, found.worker = PullState.RUNNING, worker
                found.started_at = found.started_at or timezone.now()
                found.save(update_fields=["state", "worker", "started_at"])
        return found

    def move(self, pull: Pull, state: PullState, **facts: object) -> bool:
        """Update a running pull; return False if its worker no longer holds it."""
        if state not in UNFINISHED:
            facts["finished_at"] = timezone.now()
        held = self.filter(pk=pull.pk, state=PullState.RUNNING, worker=pull.worker)
        return bool(held.update(state=state, **facts))

    def cancel(self, pk: int) -> bool:
        """Cancel a pull; its worker stops within a second. Return False if it has ended."""
        unfinished = self.filter(pk=pk, state__in=UNFINISHED)
        return bool(unfinished.update(state=PullState.CANCELLED, finished_at=timezone.now()))


class Pull(models.Model):
    """The download of a model from the hub into ``MODELS_DIR``.

    ``host`` is the host that must download it, any if empty. ``size_bytes`` is 0 until it is known;
    for a split model both sizes are those of the current part.
    """

    reference = models.CharField("model", max_length=300)
    revision = models.CharField(max_length=200, default=MAIN)
    model_id = models.CharField("ID", max_length=200, blank=True, validators=[_ID])
    host = models.CharField(max_length=128, blank=True)
    state = models.CharField(max_length=16, choices=PullState.choices, default=PullState.QUEUED)
    worker = models.CharField(max_length=128, blank=True, editable=False)
    have_bytes = models.BigIntegerField(default=0, editable=False)
    size_bytes = models.BigIntegerField(default=0, editable=False)
    error = models.TextField(blank=True, editable=False)
    requested_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.SET_NULL, null=True, blank=True, editable=False
    )
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    started_at = models.DateTimeField(null=True, editable=False)
    finished_at = models.DateTimeField(null=True, editable=False)

    objects = PullQuerySet.as_manager()

    class Meta:
        ordering = ["-pk"]
        constraints = [
            models.CheckConstraint(
                condition=models.Q(state__in=PullState.values), name="pull_state_known"
            )
        ]

    def __str__(self) -> str:
        return self.reference

    @property
    def is_going(self) -> bool:
        """Whether it has not ended."""
        return self.state in UNFINISHED
