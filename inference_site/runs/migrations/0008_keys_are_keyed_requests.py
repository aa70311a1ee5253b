"""Idempotency keys are in ``idempotency.KeyedRequest`` alone.

The column stays for one release, in which nobody reads it: processes of the previous release write
it during an upgrade.
"""

from django.db import migrations

_INDEX = """
CREATE UNIQUE INDEX CONCURRENTLY generation_one_run_a_key
ON generations_generation (api_key_id, idempotency_key)
WHERE NOT idempotency_key = '' AND status IN ('queued', 'running', 'completed')
"""


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("generations", "0007_spared_attempts")]

    operations = [
        migrations.SeparateDatabaseAndState(
            database_operations=[
                migrations.RunSQL("DROP INDEX CONCURRENTLY generation_one_run_a_key", _INDEX),
            ],
            state_operations=[
                migrations.RemoveConstraint("generation", "generation_one_run_a_key"),
                migrations.RemoveField("generation", "idempotency_key"),
            ],
        ),
    ]
