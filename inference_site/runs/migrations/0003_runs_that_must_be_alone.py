"""When a generation's worker died: from there on nothing runs beside it."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("generations", "0002_one_run_a_key")]

    operations = [
        migrations.AddField(
            "generation",
            "alone_since",
            models.DateTimeField(blank=True, null=True),
        ),
    ]
