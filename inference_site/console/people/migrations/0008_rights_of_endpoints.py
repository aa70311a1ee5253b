from importlib import import_module

from django.db import migrations

_MCP = import_module("inference_site.console.people.migrations.0005_rights_of_mcp")
OPERATOR = {
    *(f"outbox.{action}_endpoint" for action in ("view", "add", "change", "delete")),
    "outbox.view_message",
}


def give(apps, schema_editor):
    """Give roles the permissions of endpoints and messages."""
    _MCP.give_new(apps, lambda name: name.startswith("outbox."), operator=OPERATOR)


class Migration(migrations.Migration):

    dependencies = [
        ("people", "0007_rights_of_batches"),
        ("outbox", "0001_initial"),
    ]

    operations = [migrations.RunPython(give, migrations.RunPython.noop)]
