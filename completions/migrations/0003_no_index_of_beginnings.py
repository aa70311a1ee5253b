"""Without the index of beginnings of ids: nothing looks for these, and each write costs it."""

from django.db import migrations

from inference_site.core.storage.migrations import drop_like_index


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("completions", "0002_name_of_chat_completions")]

    operations = [
        drop_like_index("completions_storedcompletion", "completions_storedcompletion_public_id_65898064_like"),
    ]
