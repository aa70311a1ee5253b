"""MCP servers that operators register."""

import django.core.validators
import django.utils.timezone
from django.db import migrations, models


class Migration(migrations.Migration):

    initial = True

    dependencies = [
        ('accounts', '0005_hosts_of_mcp_servers'),
    ]

    operations = [
        migrations.CreateModel(
            name='McpServer',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('label', models.CharField(help_text='The server_label of requests; names of functions begin with it.', max_length=64, unique=True, validators=[django.core.validators.RegexValidator('\\A[A-Za-z][A-Za-z0-9_-]{0,63}\\Z', 'A letter, then letters, digits, _ and -.')])),
                ('url', models.CharField(max_length=1000, verbose_name='URL')),
                ('transport', models.CharField(choices=[('auto', 'automatic'), ('streamable_http', 'streamable HTTP'), ('sse', 'SSE')], default='auto', max_length=16)),
                ('description', models.TextField(blank=True, help_text="Shown to the model before the server's tools.", max_length=2000)),
                ('is_active', models.BooleanField(default=True, help_text='Requests may not name an inactive server.', verbose_name='active')),
                ('is_idempotent', models.BooleanField(default=False, help_text='Whether a call whose outcome is unknown, because a worker has died, is repeated. Leave it off if a tool of the server has effects and ignores idempotency keys.', verbose_name='calls may be repeated')),
                ('credentials', models.TextField(blank=True, editable=False)),
                ('oauth_issuer', models.CharField(blank=True, help_text="The authorization server, as it names itself. The site gets its tokens there with the client's ID and secret, and sends them nowhere else.", max_length=1000, verbose_name='issuer')),
                ('oauth_client_id', models.CharField(blank=True, max_length=300, verbose_name='client ID')),
                ('oauth_secret', models.TextField(blank=True, editable=False)),
                ('oauth_scope', models.CharField(blank=True, max_length=500, verbose_name='scope')),
                ('tools', models.JSONField(default=list, editable=False)),
                ('error', models.TextField(blank=True, editable=False)),
                ('checked_at', models.DateTimeField(editable=False, null=True)),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False)),
                ('projects', models.ManyToManyField(blank=True, help_text='The projects that may use it. Leave empty for all of them.', to='accounts.project')),
            ],
            options={
                'verbose_name': 'MCP server',
                'ordering': ['label'],
            },
        ),
    ]
