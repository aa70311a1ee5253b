"""Roll-ups of end users, filled from the usage log as far back as they are kept.

As ``0004_usage_of_kinds`` it holds the lock of accounting, and the end users of what processes of the previous
release account after it are not counted, until ``manage.py usage --rebuild``.
"""

import django.db.models.deletion
from django.db import migrations, models

_LOCK = "SELECT pg_advisory_xact_lock(526036160);"
_FILL = """
INSERT INTO usage_dimensionrollup (
    period, start, project_id, api_key_id, model, dimension, value, requests, completed, failed,
    cancelled, input_tokens, cached_tokens, output_tokens, reasoning_tokens, queue_ms, prefill_ms,
    decode_ms, cost
)
SELECT period, date_trunc(period, finished_at, 'UTC'), project_id, api_key_id, model, 'user',
    left(end_user, 200),
    count(*), count(*) FILTER (WHERE status = 'completed'),
    count(*) FILTER (WHERE status = 'failed'), count(*) FILTER (WHERE status = 'cancelled'),
    sum(input_tokens), sum(cached_tokens), sum(output_tokens), sum(reasoning_tokens),
    coalesce(sum(extract(epoch FROM claimed_at - created_at) * 1000), 0),
    sum(prefill_ms), sum(decode_ms), sum(cost)
FROM generations_generation,
    (VALUES ('minute', 1), ('hour', 34), ('day', 36500)) AS periods (period, days)
WHERE is_accounted AND end_user <> ''
    AND finished_at >= date_trunc('day', now(), 'UTC') - make_interval(days => days)
GROUP BY 1, 2, 3, 4, 5, 6, 7;
"""


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0007_own_keys'),
        ('generations', '0011_trace_ids'),
        ('usage', '0005_usage_of_sounds'),
    ]

    operations = [
        migrations.CreateModel(
            name='DimensionRollup',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('period', models.CharField(choices=[('minute', 'minute'), ('hour', 'hour'), ('day', 'day')], max_length=8)),
                ('start', models.DateTimeField()),
                ('model', models.CharField(max_length=200)),
                ('requests', models.PositiveBigIntegerField(default=0)),
                ('completed', models.PositiveBigIntegerField(default=0)),
                ('failed', models.PositiveBigIntegerField(default=0)),
                ('cancelled', models.PositiveBigIntegerField(default=0)),
                ('input_tokens', models.PositiveBigIntegerField(default=0)),
                ('cached_tokens', models.PositiveBigIntegerField(default=0)),
                ('output_tokens', models.PositiveBigIntegerField(default=0)),
                ('reasoning_tokens', models.PositiveBigIntegerField(default=0)),
                ('queue_ms', models.FloatField(default=0)),
                ('prefill_ms', models.FloatField(default=0)),
                ('decode_ms', models.FloatField(default=0)),
                ('cost', models.DecimalField(decimal_places=9, default=0, max_digits=24)),
                ('dimension', models.CharField(max_length=68)),
                ('value', models.CharField(max_length=200)),
                ('api_key', models.ForeignKey(db_constraint=False, db_index=False, on_delete=django.db.models.deletion.DO_NOTHING, to='accounts.apikey')),
                ('project', models.ForeignKey(db_constraint=False, db_index=False, on_delete=django.db.models.deletion.DO_NOTHING, to='accounts.project')),
            ],
            options={
                'default_permissions': (),
                'indexes': [models.Index(fields=['project', 'period', 'start', 'dimension'], name='dimension_rollup_by_project'), models.Index(fields=['value', 'dimension', 'period', 'start'], name='dimension_rollup_by_value')],
                'constraints': [models.UniqueConstraint(fields=('period', 'start', 'dimension', 'project', 'value', 'api_key', 'model'), name='dimension_rollup_once')],
            },
        ),
        migrations.RunSQL(_LOCK + _FILL, migrations.RunSQL.noop),
    ]
