"""Roll-ups of speeches and transcripts, filled from the usage log.

As in ``0004_usage_of_kinds``, whose table they are in: the lock of accounting is held for a minute
for some ten million rows, and what processes of the previous release account after it counts as
completions, until ``manage.py usage --rebuild``.
"""

from django.db import migrations

_LOCK = "SELECT pg_advisory_xact_lock(526036160);"
_KINDS = "('speech', 'speech.events', 'transcription', 'translation')"
_FILL = f"""
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
WHERE is_accounted AND kind IN {_KINDS}
GROUP BY 1, 2, 3, 4, 5, 6;
"""
_EMPTY = f"DELETE FROM usage_kindrollup WHERE kind IN {_KINDS};"


class Migration(migrations.Migration):

    dependencies = [('usage', '0004_usage_of_kinds')]

    operations = [migrations.RunSQL(_LOCK + _FILL, _EMPTY)]
