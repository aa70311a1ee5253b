"""Budgets: how much a project or a key may use in a day or a month."""

from __future__ import annotations

from decimal import Decimal

from django.core.validators import MinValueValidator
from django.db import models
from django.utils import timezone

from inference_site.accounts.models.tenants import ApiKey, Project
from inference_site.admin_pages.labels import money


class Budget(models.Model):
    """A bound on the usage of a project, or of one of its keys, in a day or month of UTC."""

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
    unit = models.CharField(max_length=8, choices=Unit.choices)
    every = models.CharField(max_length=8, choices=Every.choices)
    amount = models.DecimalField(
        max_digits=20, decimal_places=9, validators=[MinValueValidator(Decimal(0))]
    )
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["project", "api_key", "unit", "every"],
                nulls_distinct=False,
                name="budget_once",
            ),
            models.CheckConstraint(condition=models.Q(amount__gte=0), name="budget_amount"),
        ]

    def __str__(self) -> str:
        return f"{self.shown(self.amount)} a {self.every}"

    def shown(self, amount: Decimal) -> str:
        """Return an amount of this budget with its unit."""
        return money(amount) if self.unit == self.Unit.COST else f"{amount:,.0f} tokens"


class BudgetSpend(models.Model):
    """The amounts spent and reserved of a budget in one of its periods.

    They are derived from the usage log; ``manage.py usage --check`` compares the two.
    """

    budget = models.ForeignKey(Budget, on_delete=models.CASCADE, related_name="spends")
    start = models.DateField()
    spent = models.DecimalField(max_digits=24, decimal_places=9, default=0)
    reserved = models.DecimalField(max_digits=24, decimal_places=9, default=0)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["budget", "start"], name="budget_spend_once"),
        ]

    def __str__(self) -> str:
        return f"{self.budget.shown(self.spent)} since {self.start}"
