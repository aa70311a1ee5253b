from django.db import migrations

RULES = (
    ("no_worker", 10, 0),
    ("queue_wait", 60, 0),
    ("errors", 10, 3),
    ("ttft", 2000, 3),
    ("budget", 80, 0),
    ("budget", 100, 0),
    ("disk", 90, 0),
    ("redis_memory", 80, 0),
)


def create(apps, schema_editor):
    rule = apps.get_model("alarms", "Rule")
    for kind, bound, factor in RULES:
        rule.objects.get_or_create(kind=kind, bound=bound, defaults={"factor": factor})


class Migration(migrations.Migration):

    dependencies = [("alarms", "0001_initial")]

    operations = [migrations.RunPython(create, migrations.RunPython.noop)]
