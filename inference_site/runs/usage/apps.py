from __future__ import annotations

from typing import Any

from django.apps import AppConfig
from django.db import connection
from django.db.models.signals import post_save, pre_delete, pre_save


class UsageConfig(AppConfig):
    """Usage derived from the usage log: roll-ups, and the amounts spent of budgets."""

    name = "inference_site.runs.usage"
    label = "usage"
    default_auto_field = "django.db.models.BigAutoField"
    retention = "inference_site.runs.usage.dimensions"
    forgetting = "inference_site.runs.usage.dimensions"

    def ready(self) -> None:
        """Count the usage of the current period when a budget is made or changed.

        Not when the amount alone is saved: on a busy site it takes seconds to count a month.
        """
        from inference_site.accounts.models import Budget

        pre_save.connect(_before_budget_is_saved, sender=Budget)
        post_save.connect(_on_budget_saved, sender=Budget)
        pre_delete.connect(_before_budget_is_deleted, sender=Budget)


def _before_budget_is_saved(instance: Any, raw: bool = False, **_: Any) -> None:
    from inference_site.runs.usage.accounting import forget_other_spends, lock_budgets

    if not raw and instance.pk is not None:
        if connection.in_atomic_block:
            lock_budgets(instance.project_id)
        forget_other_spends(instance)


def _on_budget_saved(
    instance: Any, raw: bool = False, update_fields: frozenset[str] | None = None, **_: Any
) -> None:
    from inference_site.runs.usage.accounting import count_spends

    if not raw and update_fields != frozenset({"amount"}):
        count_spends(instance.pk)


def _before_budget_is_deleted(instance: Any, **_: Any) -> None:
    from inference_site.runs.usage.accounting import lock_budgets

    lock_budgets(instance.project_id)
