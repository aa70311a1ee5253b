"""What is kept of models: StoredModel, an entry of the catalogue; Adapter; Pull, one on its way."""

from __future__ import annotations

from collections.abc import Collection

from django.conf import settings
from django.core.validators import RegexValidator
from django.db import models, transaction
from django.db.models import Q
from django.utils import timezone

from inference_site.storage.fields import ContentField

_ID = RegexValidator(
    r"\A\w[\w.:/@+-]*\Z", "Letters and digits, and . : / @ + - _ after the first of them."
)


class StoredModel(models.Model):
    """A model that an operator has added; ``entry`` is what the models file would have of it.

    ``any_address``: the servers of the entry may be at private addresses that the settings do not
    allow. Only entries that are older than this rule have it, until they are edited.
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
    """A LoRA adapter that was added to a model, and how much of it applies to all requests.

    ``file`` lies below ``MODELS_DIR``; it is empty for one of the model's entry, which only has a
    scale here.
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


class PullState(models.TextChoices):
    """A pull moves forward only, but for one whose worker is gone: another goes on with it."""

    QUEUED = "queued"  # No worker has taken it yet.
    RUNNING = "running"  # A worker fetches it.
    COMPLETED = "completed"  # The file is there and has been checked.
    FAILED = "failed"  # ``error`` says why.
    CANCELLED = "cancelled"  # An operator stopped it; what was fetched stays for another pull.


UNFINISHED = (PullState.QUEUED, PullState.RUNNING)


class PullQuerySet(models.QuerySet["Pull"]):
    """The moves of a pull; each is a guarded UPDATE, so that only one mover wins."""

    def claim(self, worker: str, host: str, live: Collection[str]) -> Pull | None:
        """Have a worker take the oldest pull that waits, or whose worker is not among ``live``."""
        is_left = Q(state=PullState.RUNNING) & ~Q(worker__in=live)
        mine = self.filter(Q(state=PullState.QUEUED) | is_left, host__in=("", host))
        with transaction.atomic():
            found = mine.select_for_update(skip_locked=True).order_by("pk").first()
            if found is not None:
                found.state, found.worker = PullState.RUNNING, worker
                found.started_at = found.started_at or timezone.now()
                found.save(update_fields=["state", "worker", "started_at"])
        return found

    def move(self, pull: Pull, state: PullState, **facts: object) -> bool:
        """Note how a pull goes on in its worker; False if it is not that worker's any more."""
        if state not in UNFINISHED:
            facts["finished_at"] = timezone.now()
        held = self.filter(pk=pull.pk, state=PullState.RUNNING, worker=pull.worker)
        return bool(held.update(state=state, **facts))

    def cancel(self, pk: int) -> bool:
        """Stop a pull; its worker notices within a second. False if it has ended."""
        going = self.filter(pk=pk, state__in=UNFINISHED)
        return bool(going.update(state=PullState.CANCELLED, finished_at=timezone.now()))


class Pull(models.Model):
    """A model to be fetched from the hub into ``MODELS_DIR``, and then to be served.

    ``host`` is the host that has to fetch it, any if empty. ``size_bytes`` is 0 until it is known;
    of a split model both sizes are those of the part that is being fetched.
    """

    reference = models.CharField("model", max_length=300)
    revision = models.CharField(max_length=200, default="main")
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
