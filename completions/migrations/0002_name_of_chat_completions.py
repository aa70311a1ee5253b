from django.db import migrations


class Migration(migrations.Migration):

    dependencies = [
        ("completions", "0001_initial"),
    ]

    operations = [
        migrations.AlterModelOptions(
            name="storedcompletion",
            options={"verbose_name": "chat completion"},
        ),
    ]
