from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0003_scopes_are_called_permissions'),
    ]

    operations = [
        migrations.AddField(
            model_name='apikey',
            name='priority_requests_per_minute',
            field=models.PositiveIntegerField(db_default=0, default=0, help_text='Requests for the service tier "priority" that are served before others. More are served as usual. 0: none.'),
        ),
    ]
