"""An index of what waits by project, so that a claim reads a few rows of it and not all."""

from django.contrib.postgres.operations import AddIndexConcurrently, RemoveIndexConcurrently
from django.db import migrations, models


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("generations", "0003_runs_that_must_be_alone")]

    operations = [
        AddIndexConcurrently(
            "generation",
            models.Index(
                fields=["model", "service_class", "project", "created_at"],
                condition=models.Q(status="queued"),
                name="generation_line",
            ),
        ),
        RemoveIndexConcurrently("generation", "generation_waiting"),
    ]
