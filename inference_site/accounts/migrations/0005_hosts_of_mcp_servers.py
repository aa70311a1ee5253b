"""A project may use MCP servers of these hosts."""

import django.contrib.postgres.fields
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0004_priority_of_keys'),
    ]

    operations = [
        migrations.AddField(
            model_name='project',
            name='mcp_hosts',
            field=django.contrib.postgres.fields.ArrayField(base_field=models.CharField(max_length=253), blank=True, db_default=[], default=list, help_text='Hosts, separated by commas, whose MCP servers requests may name by a URL; .example.org includes all names below it. Leave empty for all that the site allows.', size=None, verbose_name='hosts of MCP servers'),
        ),
    ]
