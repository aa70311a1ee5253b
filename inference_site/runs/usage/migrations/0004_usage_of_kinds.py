"""Roll-ups of embeddings and moderations, filled from the usage log.

Reading the log takes a minute for some ten million rows. It holds the lock of accounting: meanwhile
roll-ups and the spent amounts of budgets are not brought up to date, and requests do not wait. What
processes of the previous release account after it counts as completions, until
``manage.py usage --rebuild``.
"""

import django.db.models.deletion
from django.db import migrations, models

_LOCK = "SELECT pg_advisory_xact_lock(526036160);"
_FILL = """
INSERT INTO usage_kindrollup (
    period, start, project_id, api_key_id, model, kind, requests, completed, failed, cancelled,
    input_tokens, cached_tokens, output_tokens, reasoning_tokens, queue_ms, prefill_ms, decode_ms,
    cost
)
SELECT period, date_trunc(period, finished_at, 'UTC'), project_id, api_key_id, model, kind,
    count(*), count(*) FILTER (WHERE status = 'completed'),
    count(*) FILTER (WHERE status = 'failed'), count(*) FILTER (WHERE status = 'cancelled'),
    sum(input_tokens), sum(cached_tokens), sum(output_tokens), sum(reasoning_tokens),
    coalesce(sum(extract(epoch FROM claimed_at - created_at) * 1000), 0),
    sum(prefill_ms), sum(decode_ms), sum(cost)
FROM generations_generation, unnest(ARRAY['minute', 'hour', 'day']) AS period
WHERE is_accounted AND kind IN (
    'embedding', 'ollama.embedding', 'vector_store.embedding', 'vector_store.search', 'moderation'
)
GROUP BY 1, 2, 3, 4, 5, 6;
"""


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0006_retention_by_kind'),
        ('usage', '0003_pruned_log'),
        ('generations', '0009_priority_class'),
    ]

    operations = [
        migrations.CreateModel(
            name='KindRollup',
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
                ('kind', models.CharField(max_length=32)),
                ('api_key', models.ForeignKey(db_constraint=False, db_index=False, on_delete=django.db.models.deletion.DO_NOTHING, to='accounts.apikey')),
                ('project', models.ForeignKey(db_constraint=False, db_index=False, on_delete=django.db.models.deletion.DO_NOTHING, to='accounts.project')),
            ],
            options={
                'default_permissions': (),
                'indexes': [models.Index(fields=['project', 'period', 'start'], name='kind_rollup_by_project')],
                'constraints': [models.UniqueConstraint(fields=('period', 'start', 'project', 'api_key', 'model', 'kind'), name='kind_rollup_once')],
            },
        ),
        migrations.RunSQL(_LOCK + _FILL, migrations.RunSQL.noop),
    ]
