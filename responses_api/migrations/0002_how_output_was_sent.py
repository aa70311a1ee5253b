from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("responses_api", "0001_initial")]

    operations = [
        migrations.AddField(
            model_name="storedresponse",
            name="deltas",
            field=models.JSONField(blank=True, null=True),
        ),
    ]
