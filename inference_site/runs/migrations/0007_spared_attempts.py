"""Attempts that were ended from outside are counted, because they do not count as attempts."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("generations", "0006_no_index_of_beginnings")]

    operations = [
        migrations.AddField(
            "generation", "spared", models.PositiveSmallIntegerField(default=0, db_default=0)
        ),
    ]
