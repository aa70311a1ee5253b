from importlib import import_module

from django.db import migrations

_MCP = import_module("inference_site.console.people.migrations.0005_rights_of_mcp")
VIEWER = ("batches.view_batch",)
OPERATOR = (*VIEWER, "batches.change_batch")


def give(apps, schema_editor):
    """Give roles the permissions of batches."""
    _MCP.give_new(
        apps, lambda name: name.startswith("batches."), operator=OPERATOR, viewer=VIEWER
    )


class Migration(migrations.Migration):

    dependencies = [
        ("people", "0006_rights_of_files"),
        ("batches", "0001_initial"),
    ]

    operations = [migrations.RunPython(give, migrations.RunPython.noop)]
