"""An index of what waits by project, so that a claim reads a few rows of it and not all.

That of what has not ended could be taken for it by statistics of a time when nothing waited.
"""

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
        AddIndexConcurrently(
            "generation",
            models.Index(
                fields=["project", "api_key"],
                condition=models.Q(finished_at=None),
                name="generation_unfinished",
            ),
        ),
        RemoveIndexConcurrently("generation", "generation_in_flight"),
    ]
