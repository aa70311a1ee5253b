"""The tables of projects, API keys and budgets; web packages import them from here."""

from inference_site.accounts.models.budgets import Budget, BudgetSpend
from inference_site.accounts.models.tenants import (
    ApiKey,
    KeySecret,
    Project,
    Scope,
    default_scopes,
)

__all__ = [
    "ApiKey",
    "Budget",
    "BudgetSpend",
    "KeySecret",
    "Project",
    "Scope",
    "default_scopes",
]
