from importlib import import_module

from django.db import migrations

_ROLES = import_module("inference_site.console.people.migrations.0002_roles")


def give(apps, schema_editor):
    """Give the administrator the permissions of files.

    A role from which a site has taken something stays as it is.
    """
    _ROLES._create_permissions()
    permissions = apps.get_model("auth", "Permission").objects
    of_accounts = permissions.filter(content_type__app_label="accounts")
    administrator = apps.get_model("auth", "Group").objects.filter(name="administrator").first()
    if administrator and not of_accounts.exclude(group=administrator).exists():
        administrator.permissions.add(*permissions.filter(content_type__app_label="files"))


class Migration(migrations.Migration):

    dependencies = [
        ("people", "0005_rights_of_mcp"),
        ("files", "0001_initial"),
    ]

    operations = [migrations.RunPython(give, migrations.RunPython.noop)]
