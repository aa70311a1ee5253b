from importlib import import_module

from django.db import migrations

_MCP = import_module("inference_site.console.people.migrations.0005_rights_of_mcp")
VIEWER = ("cases.view_caseset",)
OPERATOR = (*VIEWER, "cases.change_caseset", "cases.delete_caseset")


def give(apps, schema_editor):
    """Give roles the permissions for sets of cases."""
    _MCP.give_new(apps, lambda name: name.startswith("cases."), operator=OPERATOR, viewer=VIEWER)


class Migration(migrations.Migration):

    dependencies = [
        ("people", "0011_rights_of_alarms"),
        ("cases", "0001_cases"),
    ]

    operations = [migrations.RunPython(give, migrations.RunPython.noop)]
