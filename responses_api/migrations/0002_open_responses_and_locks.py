"""Indexes of the few rows that maintenance looks at every second."""

from django.contrib.postgres.operations import AddIndexConcurrently
from django.db import migrations, models


class Migration(migrations.Migration):
    atomic = False

    dependencies = [("responses_api", "0001_initial")]

    operations = [
        AddIndexConcurrently(
            "conversation",
            models.Index(
                condition=models.Q(("locked_by", ""), _negated=True),
                fields=["id"],
                name="conversation_locked",
            ),
        ),
        AddIndexConcurrently(
            "storedresponse",
            models.Index(
                condition=models.Q(("status__in", ["queued", "in_progress"])),
                fields=["id"],
                name="response_open",
            ),
        ),
    ]
