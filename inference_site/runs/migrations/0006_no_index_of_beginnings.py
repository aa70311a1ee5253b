"""Without the index of beginnings of ids: nothing looks for these, and each write costs it."""

from django.db import migrations

from inference_site.core.storage.migrations import drop_like_index


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("generations", "0005_cancels_that_are_kept")]

    operations = [
        drop_like_index("generations_generation", "generations_generation_public_id_1377573c_like"),
    ]
