from django.db import migrations, models

_RUNS_OR_HAS_RUN = models.Q(status__in=["queued", "running", "completed"])
# Without a lock on the table, to which requests write meanwhile.
_CREATE = """
CREATE UNIQUE INDEX CONCURRENTLY generation_one_run_a_key
ON generations_generation (api_key_id, idempotency_key)
WHERE NOT idempotency_key = '' AND status IN ('queued', 'running', 'completed')
"""


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("generations", "0001_initial")]

    operations = [
        migrations.AddField(
            model_name="generation",
            name="idempotency_key",
            field=models.CharField(blank=True, db_default="", default="", max_length=64),
        ),
        migrations.SeparateDatabaseAndState(
            database_operations=[
                migrations.RunSQL(_CREATE, "DROP INDEX generation_one_run_a_key"),
            ],
            state_operations=[
                migrations.AddConstraint(
                    model_name="generation",
                    constraint=models.UniqueConstraint(
                        fields=["api_key", "idempotency_key"],
                        condition=~models.Q(idempotency_key="") & _RUNS_OR_HAS_RUN,
                        name="generation_one_run_a_key",
                    ),
                ),
            ],
        ),
    ]
