from importlib import import_module

from django.db import migrations

_ROLES = import_module("inference_site.console.people.migrations.0002_roles")
_BEFORE = import_module("inference_site.console.people.migrations.0003_rights_of_presets")


def give(apps, schema_editor):
    """Give administrators and operators the permission to make keys of their own.

    A role from which a site has taken something stays as it is.
    """
    _ROLES._create_permissions()
    permissions = apps.get_model("auth", "Permission").objects.select_related("content_type")
    of_accounts = permissions.filter(content_type__app_label="accounts")
    own = of_accounts.get(codename="make_own_key")
    for role in apps.get_model("auth", "Group").objects.all():
        names = _BEFORE._names(role.permissions)
        before = of_accounts.exclude(pk=own.pk)
        if role.name == "administrator" and not before.exclude(group=role).exists():
            role.permissions.add(own)
        elif role.name == "operator" and set(_ROLES.OPERATOR) <= names:
            role.permissions.add(own)


class Migration(migrations.Migration):

    dependencies = [
        ("people", "0009_rights_of_vector_stores"),
        ("accounts", "0007_own_keys"),
    ]

    operations = [migrations.RunPython(give, migrations.RunPython.noop)]
