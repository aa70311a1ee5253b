from importlib import import_module

from django.db import migrations

_MCP = import_module("inference_site.console.people.migrations.0005_rights_of_mcp")
VIEWER = ("vector_stores.view_vectorstore",)


def give(apps, schema_editor):
    """Give roles the permission to see vector stores."""
    _MCP.give_new(
        apps, lambda name: name.startswith("vector_stores."), operator=VIEWER, viewer=VIEWER
    )


class Migration(migrations.Migration):

    dependencies = [
        ("people", "0008_rights_of_endpoints"),
        ("vector_stores", "0001_vector_stores"),
    ]

    operations = [migrations.RunPython(give, migrations.RunPython.noop)]
