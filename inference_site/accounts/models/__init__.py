"""Tenants with their keys and budgets, and the usage that is accounted to them."""

from inference_site.accounts.models.budgets import Budget, BudgetSpend
from inference_site.usage.models import LatencyRollup, Period, UsageRollup
from inference_site.accounts.models.tenants import ApiKey, KeySecret, Project, Scope

__all__ = [
    "ApiKey",
    "Budget",
    "BudgetSpend",
    "KeySecret",
    "LatencyRollup",
    "Period",
    "Project",
    "Scope",
    "UsageRollup",
]
