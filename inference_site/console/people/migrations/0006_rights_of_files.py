from importlib import import_module

from django.db import migrations

_MCP = import_module("inference_site.console.people.migrations.0005_rights_of_mcp")


def give(apps, schema_editor):
    """Give the administrator the permissions of files."""
    _MCP.give_new(apps, lambda name: name.startswith("files."))


class Migration(migrations.Migration):

    dependencies = [
        ("people", "0005_rights_of_mcp"),
        ("files", "0001_initial"),
    ]

    operations = [migrations.RunPython(give, migrations.RunPython.noop)]
