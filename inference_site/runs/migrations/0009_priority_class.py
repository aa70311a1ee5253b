from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('generations', '0008_keys_are_keyed_requests'),
    ]

    operations = [
        migrations.AlterField(
            model_name='generation',
            name='service_class',
            field=models.SmallIntegerField(choices=[(-10, 'urgent'), (-5, 'priority'), (0, 'foreground'), (10, 'background')], default=0),
        ),
    ]
