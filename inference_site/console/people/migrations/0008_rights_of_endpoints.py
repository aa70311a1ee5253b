from importlib import import_module

from django.db import migrations

_ROLES = import_module("inference_site.console.people.migrations.0002_roles")
_BEFORE = import_module("inference_site.console.people.migrations.0003_rights_of_presets")
OPERATOR = {
    *(f"outbox.{action}_endpoint" for action in ("view", "add", "change", "delete")),
    "outbox.view_message",
}


def give(apps, schema_editor):
    """Give roles the permissions of endpoints and messages.

    A role from which a site has taken something stays as it is.
    """
    _ROLES._create_permissions()
    permissions = apps.get_model("auth", "Permission").objects.select_related("content_type")
    new = list(permissions.filter(content_type__app_label="outbox"))
    of_accounts = permissions.filter(content_type__app_label="accounts")
    for role in apps.get_model("auth", "Group").objects.all():
        names = _BEFORE._names(role.permissions)
        if role.name == "administrator" and not of_accounts.exclude(group=role).exists():
            role.permissions.add(*new)
        elif role.name == "operator" and set(_ROLES.OPERATOR) <= names:
            role.permissions.add(*(one for one in new if _BEFORE._name(one) in OPERATOR))


class Migration(migrations.Migration):

    dependencies = [
        ("people", "0007_rights_of_batches"),
        ("outbox", "0001_initial"),
    ]

    operations = [migrations.RunPython(give, migrations.RunPython.noop)]
