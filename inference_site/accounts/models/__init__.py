"""Tenants with their keys and budgets."""

from inference_site.accounts.models.budgets import Budget, BudgetSpend
from inference_site.accounts.models.tenants import ApiKey, KeySecret, Project, Scope

__all__ = [
    "ApiKey",
    "Budget",
    "BudgetSpend",
    "KeySecret",
    "Project",
    "Scope",
]
