"""Deletes the hidden conversations that nothing needs: earlier releases left them."""

from typing import Any

from django.db import migrations, transaction


def sweep(apps: Any, _: Any) -> None:
    """Delete hidden conversations of which all responses are hidden and none is built on."""
    conversations = apps.get_model("responses_api", "Conversation").objects
    responses = apps.get_model("responses_api", "StoredResponse").objects
    items = apps.get_model("responses_api", "Item").objects
    for pk in conversations.exclude(deleted_at=None).values_list("pk", flat=True):
        with transaction.atomic():
            conversations.select_for_update().filter(pk=pk).first()
            own = responses.filter(conversation=pk)
            if own.filter(deleted_at=None).exists():
                continue
            list(own.select_for_update().order_by("pk"))
            if not responses.filter(previous__conversation=pk).exists():
                items.filter(conversation=pk).delete()
                own.delete()
                conversations.filter(pk=pk).delete()


class Migration(migrations.Migration):
    atomic = False

    dependencies = [("responses_api", "0003_how_output_was_sent")]

    operations = [migrations.RunPython(sweep, migrations.RunPython.noop)]
