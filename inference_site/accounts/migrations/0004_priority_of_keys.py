import django.core.validators
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0003_scopes_are_called_permissions'),
    ]

    operations = [
        migrations.AddField(
            model_name='apikey',
            name='priority_requests_per_minute',
            field=models.PositiveIntegerField(blank=True, help_text='Requests for the service tier "priority" that are served before others; more are served as usual. Leave empty for none.', null=True, validators=[django.core.validators.MinValueValidator(1)]),
        ),
    ]
