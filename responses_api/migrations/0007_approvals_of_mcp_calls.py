"""Approvals of calls of MCP tools, and their answers."""

import django.db.models.deletion
import django.utils.timezone
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0005_hosts_of_mcp_servers'),
        ('responses_api', '0006_prompt_templates'),
    ]

    operations = [
        migrations.CreateModel(
            name='McpApproval',
            fields=[
                ('item', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, primary_key=True, related_name='approval', serialize=False, to='responses_api.item')),
                ('server_label', models.CharField(max_length=64)),
                ('name', models.CharField(max_length=128)),
                ('arguments_sha256', models.CharField(max_length=64)),
                ('asked_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('approve', models.BooleanField(null=True)),
                ('answered_by', models.CharField(blank=True, default='', max_length=64)),
                ('answered_at', models.DateTimeField(null=True)),
                ('project', models.ForeignKey(db_index=False, on_delete=django.db.models.deletion.PROTECT, to='accounts.project')),
            ],
            options={
                'verbose_name': 'approval',
                'default_permissions': ('view',),
                'indexes': [models.Index(condition=models.Q(('answered_at__isnull', True)), fields=['item'], name='approval_waiting')],
            },
        ),
    ]
