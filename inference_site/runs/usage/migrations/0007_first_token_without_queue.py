"""Histograms of the time to first token without the queue wait, filled from the usage log.

As ``0004_usage_of_kinds`` it holds the lock of accounting, and what processes of the previous release account after it
is not counted, until ``manage.py usage --rebuild``.
"""

from django.db import migrations, models

_LOCK = "SELECT pg_advisory_xact_lock(526036160);"
_FILL = """
INSERT INTO usage_latencyhistogram (
    period, start, project_id, api_key_id, model, measure, bucket, count
)
SELECT period, start, coalesce(project_id, 0), coalesce(api_key_id, 0), model, 'prefill', bucket,
    count(*)
FROM (
    SELECT period, date_trunc(period, finished_at, 'UTC') AS start, project_id, api_key_id, model,
        floor(2 * ln(greatest(extract(epoch FROM first_token_at - claimed_at)::float * 1000, 0.01))
            / ln(2::float))::smallint AS bucket
    FROM generations_generation,
        (VALUES ('minute', 1), ('hour', 34), ('day', 36500)) AS periods (period, days)
    WHERE is_accounted AND first_token_at IS NOT NULL AND claimed_at IS NOT NULL
        AND finished_at >= date_trunc('day', now(), 'UTC') - make_interval(days => days)
) AS measured
GROUP BY period, start, model, bucket,
    GROUPING SETS ((project_id, api_key_id), (project_id), ());
"""
_CHOICES = [
    ("queue", "queue wait (ms)"),
    ("ttft", "time to first token (ms)"),
    ("prefill", "time to first token without the queue wait (ms)"),
    ("speed", "tokens per second"),
]


class Migration(migrations.Migration):

    dependencies = [
        ("generations", "0013_admission_ms"),
        ("usage", "0006_usage_of_dimensions"),
    ]

    operations = [
        migrations.AlterField(
            model_name="latencyhistogram",
            name="measure",
            field=models.CharField(choices=_CHOICES, max_length=8),
        ),
        migrations.AlterField(
            model_name="latencyrollup",
            name="measure",
            field=models.CharField(choices=_CHOICES, max_length=8),
        ),
        migrations.RunSQL(_LOCK + _FILL, migrations.RunSQL.noop),
    ]
