"""Whether one in the background is to be stopped, also when Redis has lost the flag of that."""

from django.contrib.postgres.operations import AddIndexConcurrently
from django.db import migrations, models


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("generations", "0004_line")]

    operations = [
        migrations.AddField(
            "generation", "cancel_requested_at", models.DateTimeField(blank=True, null=True)
        ),
        AddIndexConcurrently(
            "generation",
            models.Index(
                fields=["cancel_requested_at"],
                condition=models.Q(finished_at=None, cancel_requested_at__isnull=False),
                name="generation_to_stop",
            ),
        ),
    ]
