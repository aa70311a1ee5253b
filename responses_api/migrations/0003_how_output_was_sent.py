from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("responses_api", "0002_open_responses_and_locks")]

    operations = [
        migrations.AddField(
            model_name="storedresponse",
            name="deltas",
            field=models.JSONField(blank=True, null=True),
        ),
    ]
