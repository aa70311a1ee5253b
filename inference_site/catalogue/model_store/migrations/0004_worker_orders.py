import django.db.models.functions.datetime
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('model_store', '0003_adapters'),
    ]

    operations = [
        migrations.CreateModel(
            name='WorkerOrder',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('worker', models.CharField(blank=True, max_length=128)),
                ('model_id', models.CharField(blank=True, max_length=200, verbose_name='model')),
                ('state', models.CharField(choices=[('loaded', 'Loaded'), ('reloaded', 'Reloaded'), ('unloaded', 'Unloaded'), ('drained', 'Drained'), ('active', 'Active')], max_length=16)),
                ('ordered_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('seen_at', models.DateTimeField(null=True)),
            ],
            options={
                'default_permissions': (),
                'constraints': [models.UniqueConstraint(fields=('worker', 'model_id'), name='order_to_worker'), models.CheckConstraint(condition=models.Q(('state__in', ['loaded', 'reloaded', 'unloaded', 'drained', 'active'])), name='order_state_known')],
            },
        ),
    ]
