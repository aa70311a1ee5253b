import django.db.models.deletion
import django.utils.timezone
from django.conf import settings
from django.db import migrations, models

import responses_api.models


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0001_initial'),
        ('responses_api', '0005_no_index_of_beginnings'),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.CreateModel(
            name='PromptTemplate',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('public_id', models.CharField(default=responses_api.models.new_prompt_id, editable=False, max_length=64, unique=True, verbose_name='ID')),
                ('name', models.CharField(max_length=100)),
                ('default_version', models.PositiveIntegerField(blank=True, help_text='The version for requests that name none. Leave empty for the newest.', null=True)),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False)),
                ('project', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to='accounts.project')),
            ],
            options={
                'ordering': ['name', 'id'],
                'constraints': [models.UniqueConstraint(fields=('project', 'name'), name='prompt_name_once')],
            },
        ),
        migrations.CreateModel(
            name='PromptVersion',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('number', models.PositiveIntegerField()),
                ('developer_message', models.TextField(blank=True, max_length=50000)),
                ('user_message', models.TextField(blank=True, max_length=50000)),
                ('model', models.CharField(blank=True, max_length=200)),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False)),
                ('created_by', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.AUTH_USER_MODEL)),
                ('template', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='versions', to='responses_api.prompttemplate')),
            ],
            options={
                'ordering': ['-number'],
                'constraints': [models.UniqueConstraint(fields=('template', 'number'), name='prompt_version_once')],
            },
        ),
    ]
