from importlib import import_module

from django.db import migrations

_ROLES = import_module("inference_site.console.people.migrations.0002_roles")
_DELETE_PRESET = "playground.delete_preset"
_NEW_APPS = ("playground", "kept_content")


def give(apps, schema_editor):
    """Give roles the permissions of apps that came after them.

    A role from which a site has taken something stays as it is.
    """
    _ROLES._create_permissions()
    groups = apps.get_model("auth", "Group").objects
    permissions = apps.get_model("auth", "Permission").objects
    new = permissions.filter(content_type__app_label__in=_NEW_APPS)
    before = permissions.exclude(content_type__app_label__in=_NEW_APPS)
    administrator = groups.filter(name="administrator").first()
    if administrator and not before.exclude(group=administrator).exists():
        administrator.permissions.add(*new)
    operator = groups.filter(name="operator").first()
    if operator and set(_ROLES.OPERATOR) <= _names(operator.permissions):
        operator.permissions.add(*(one for one in new if _name(one) == _DELETE_PRESET))


def _names(permissions):
    return {_name(one) for one in permissions.select_related("content_type")}


def _name(permission):
    return f"{permission.content_type.app_label}.{permission.codename}"


class Migration(migrations.Migration):

    dependencies = [
        ("people", "0002_roles"),
        ("playground", "0001_initial"),
        ("kept_content", "0001_initial"),
    ]

    operations = [migrations.RunPython(give, migrations.RunPython.noop)]
