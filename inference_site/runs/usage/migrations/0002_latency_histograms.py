"""Histograms with sums over the keys of a project and over all projects, in a table of their own.

Processes of the release before go on writing to the old table while this runs and after it. What
they write from then on is moved by the accounting of this release, at most a second after it is
there; until a process of this release accounts, it waits in the old table. Meanwhile the pages of
the release before show no latencies of earlier hours, and its ``manage.py usage`` may neither check
nor rebuild.

The move holds the lock of accounting: minutes for millions of rows, during which roll-ups and the
spent amounts of budgets are not brought up to date. Requests do not wait for it.
"""

import django.db.models.deletion
from django.db import migrations, models

_LOCK = "SELECT pg_advisory_xact_lock(526036160);"
_MOVE = """
INSERT INTO usage_latencyhistogram
    (period, start, project_id, api_key_id, model, measure, bucket, count)
SELECT period, start, coalesce(project_id, 0), coalesce(api_key_id, 0), model, measure, bucket,
    sum(count)
FROM usage_latencyrollup
GROUP BY period, start, model, measure, bucket,
    GROUPING SETS ((project_id, api_key_id), (project_id), ());
TRUNCATE usage_latencyrollup;
"""
_MOVE_BACK = """
INSERT INTO usage_latencyrollup AS kept
    (period, start, project_id, api_key_id, model, measure, bucket, count)
SELECT period, start, project_id, api_key_id, model, measure, bucket, count
FROM usage_latencyhistogram WHERE api_key_id <> 0
ON CONFLICT (period, start, project_id, api_key_id, model, measure, bucket)
    DO UPDATE SET count = kept.count + excluded.count;
"""


class Migration(migrations.Migration):
    dependencies = [("accounts", "0001_initial"), ("usage", "0001_initial")]

    operations = [
        migrations.CreateModel(
            name="LatencyHistogram",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                (
                    "period",
                    models.CharField(
                        choices=[("minute", "minute"), ("hour", "hour"), ("day", "day")],
                        max_length=8,
                    ),
                ),
                ("start", models.DateTimeField()),
                ("model", models.CharField(max_length=200)),
                (
                    "measure",
                    models.CharField(
                        choices=[
                            ("queue", "queue wait (ms)"),
                            ("ttft", "time to first token (ms)"),
                            ("speed", "tokens per second"),
                        ],
                        max_length=8,
                    ),
                ),
                ("bucket", models.SmallIntegerField()),
                ("count", models.PositiveBigIntegerField(default=0)),
                (
                    "api_key",
                    models.ForeignKey(
                        db_constraint=False,
                        db_index=False,
                        on_delete=django.db.models.deletion.DO_NOTHING,
                        to="accounts.apikey",
                    ),
                ),
                (
                    "project",
                    models.ForeignKey(
                        db_constraint=False,
                        db_index=False,
                        on_delete=django.db.models.deletion.DO_NOTHING,
                        to="accounts.project",
                    ),
                ),
            ],
            options={
                "indexes": [
                    models.Index(fields=["period", "start"], name="latency_histogram_by_age")
                ],
                "constraints": [
                    models.UniqueConstraint(
                        fields=(
                            "period",
                            "api_key",
                            "project",
                            "start",
                            "model",
                            "measure",
                            "bucket",
                        ),
                        name="latency_histogram_once",
                    )
                ],
            },
        ),
        migrations.RunSQL(_LOCK + _MOVE, _LOCK + _MOVE_BACK),
    ]
