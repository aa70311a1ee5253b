"""An operator can move a generation up: a class before all others."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('worker', '0004_accounting'),
    ]

    operations = [
        migrations.AlterField(
            model_name='generation',
            name='service_class',
            field=models.SmallIntegerField(choices=[(-10, 'urgent'), (0, 'foreground'), (10, 'background')], default=0),
        ),
    ]
