"""Entries with servers of their own keep the addresses that they have until they are edited."""

from django.db import migrations, models


def keep_addresses(apps, schema_editor):
    stored = apps.get_model("model_store", "StoredModel").objects
    stored.filter(entry__engine="openai_upstream").update(any_address=True)


class Migration(migrations.Migration):

    dependencies = [("model_store", "0001_initial")]

    operations = [
        migrations.AddField(
            model_name="storedmodel",
            name="any_address",
            field=models.BooleanField(db_default=False, default=False, editable=False),
        ),
        migrations.RunPython(keep_addresses, migrations.RunPython.noop),
    ]
