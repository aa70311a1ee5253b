"""Notes since when the usage log is complete, for sites that have deleted generations before."""

import datetime as dt

from django.conf import settings
from django.db import migrations, models
from django.utils import timezone


def note_deleted(apps, schema_editor):
    site = apps.get_model("site_settings", "SiteSettings").objects.first()
    if not settings.USAGE_LOG_DAYS and not (site and site.usage_log_days):
        return
    generations = apps.get_model("generations", "Generation").objects.order_by("pk")
    oldest = generations.values_list("created_at", flat=True).first() or timezone.now()
    day = (oldest + dt.timedelta(days=2)).astimezone(dt.UTC)
    complete_since = day.replace(hour=0, minute=0, second=0, microsecond=0)
    pruned_log = apps.get_model("usage", "PrunedLog")
    pruned_log.objects.bulk_create(
        pruned_log(project_id=pk, complete_since=complete_since)
        for pk in apps.get_model("accounts", "Project").objects.values_list("pk", flat=True)
    )


class Migration(migrations.Migration):
    dependencies = [
        ("usage", "0002_latency_histograms"),
        ("accounts", "0006_retention_by_kind"),
        ("generations", "0009_priority_class"),
        ("site_settings", "0003_retention_by_kind"),
    ]

    operations = [
        migrations.CreateModel(
            name="PrunedLog",
            fields=[
                ("project_id", models.BigIntegerField(primary_key=True, serialize=False)),
                ("complete_since", models.DateTimeField()),
            ],
            options={"default_permissions": ()},
        ),
        migrations.RunPython(note_deleted, migrations.RunPython.noop),
    ]
