"""Without the index of beginnings of ids: nothing looks for these, and each write costs it."""

from django.db import migrations

from inference_site.core.storage.migrations import drop_like_index


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("responses_api", "0004_sweep_deleted_conversations")]

    operations = [
        drop_like_index("responses_api_storedresponse", "responses_api_storedresponse_public_id_1c6bc1a4_like"),
        drop_like_index("responses_api_item", "responses_api_item_public_id_8f15aa6f_like"),
        drop_like_index("responses_api_conversation", "responses_api_conversation_public_id_742e2a8d_like"),
    ]
