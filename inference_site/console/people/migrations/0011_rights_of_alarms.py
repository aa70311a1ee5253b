from importlib import import_module

from django.db import migrations

_ROLES = import_module("inference_site.console.people.migrations.0002_roles")
_BEFORE = import_module("inference_site.console.people.migrations.0003_rights_of_presets")


def give(apps, schema_editor):
    """Let operators acknowledge and snooze alarms.

    A role from which a site has taken something stays as it is.
    """
    _ROLES._create_permissions()
    change = apps.get_model("auth", "Permission").objects.get(
        content_type__app_label="alarms", codename="change_alarm"
    )
    operator = apps.get_model("auth", "Group").objects.filter(name="operator").first()
    if operator and set(_ROLES.OPERATOR) <= _BEFORE._names(operator.permissions):
        operator.permissions.add(change)


class Migration(migrations.Migration):

    dependencies = [
        ("people", "0010_rights_of_own_keys"),
        ("alarms", "0004_scope_and_handling"),
    ]

    operations = [migrations.RunPython(give, migrations.RunPython.noop)]
