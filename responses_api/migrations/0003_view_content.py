"""Who may see prompts and answers is a permission of its own."""

from django.db import migrations


class Migration(migrations.Migration):

    dependencies = [
        ('responses_api', '0002_search_and_order'),
    ]

    operations = [
        migrations.AlterModelOptions(
            name='storedresponse',
            options={'permissions': [('view_content', 'Can see prompts and answers')], 'verbose_name': 'response'},
        ),
    ]
