"""An index of requests by end user, so that the console and ``forget`` find those of one."""

from django.contrib.postgres.operations import AddIndexConcurrently
from django.db import migrations, models


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("generations", "0009_priority_class")]

    operations = [
        AddIndexConcurrently(
            "generation",
            models.Index(
                fields=["end_user", "-id"],
                condition=~models.Q(end_user=""),
                name="generation_by_end_user",
            ),
        ),
    ]
