from django.contrib.postgres.operations import AddIndexConcurrently
from django.db import migrations, models


class Migration(migrations.Migration):

    atomic = False

    dependencies = [("accounts", "0008_budgets_for_each")]

    operations = [
        AddIndexConcurrently(
            "budgetspend",
            models.Index(
                condition=models.Q(value=""), fields=["start"], name="budget_spend_by_start"
            ),
        ),
    ]
