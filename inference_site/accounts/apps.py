from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.apps import AppConfig
from django.db.models.signals import post_save

if TYPE_CHECKING:
    from inference_site.accounts.models import Budget


class AccountsConfig(AppConfig):
    """Projects and their API keys."""

    name = "inference_site.accounts"
    label = "accounts"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Have a budget begin with what was used before it was made, or made another."""
        from inference_site.accounts.models import Budget

        post_save.connect(_on_budget_saved, sender=Budget)


def _on_budget_saved(instance: Budget, raw: bool = False, **_: Any) -> None:
    from inference_site.usage.reconciliation import count_spends

    if not raw:
        count_spends(instance.pk)
