"""The console calls the scopes of a key its permissions; the column stays as it is."""

import django.contrib.postgres.fields
import inference_site.accounts.models
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0002_retention'),
    ]

    operations = [
        migrations.AlterField(
            model_name='apikey',
            name='scopes',
            field=django.contrib.postgres.fields.ArrayField(base_field=models.CharField(choices=[('inference', 'inference'), ('usage:read', 'usage:read'), ('debug', 'debug'), ('models:write', 'models:write'), ('admin', 'admin')], max_length=32), blank=True, default=inference_site.accounts.models.default_scopes, size=None, verbose_name='permissions'),
        ),
    ]
