from django.apps import apps as installed
from django.contrib.auth.management import create_permissions
from django.contrib.contenttypes.management import create_contenttypes
from django.db import migrations

VIEWER = (
    "usage.view_usagerollup",
    "generations.view_generation",
    "responses_api.view_storedresponse",
    "responses_api.view_conversation",
    "completions.view_storedcompletion",
    "alarms.view_alarm",
    "alarms.view_rule",
    "accounts.view_project",
    "accounts.view_apikey",
    "accounts.view_budget",
    "model_store.view_storedmodel",
    "model_store.view_pull",
)
OPERATOR = (
    *VIEWER,
    "generations.change_generation",
    "responses_api.change_storedresponse",
    "alarms.add_rule",
    "alarms.change_rule",
    "alarms.delete_rule",
    "model_store.add_storedmodel",
    "model_store.change_storedmodel",
    "model_store.delete_storedmodel",
    "model_store.add_pull",
    "site_settings.view_sitesettings",
)


def create(apps, schema_editor):
    """Make the roles that there are not. An administrator has every permission that there is."""
    _create_permissions()
    groups = apps.get_model("auth", "Group").objects
    permissions = apps.get_model("auth", "Permission").objects.select_related("content_type")
    by_name = {f"{one.content_type.app_label}.{one.codename}": one for one in permissions.all()}
    roles = {"viewer": VIEWER, "operator": OPERATOR, "administrator": tuple(by_name)}
    for role, names in roles.items():
        group, is_new = groups.get_or_create(name=role)
        if is_new:  # A group of this name that a site has made stays as it is.
            group.permissions.set([by_name[name] for name in names])


def _create_permissions():
    """Create the permissions now; Django does so after the last migration."""
    for app in installed.get_app_configs():
        create_contenttypes(app, verbosity=0)
        create_permissions(app, verbosity=0)


class Migration(migrations.Migration):

    dependencies = [
        ("people", "0001_initial"),
        ("auth", "0012_alter_user_first_name_max_length"),
        ("contenttypes", "0002_remove_content_type_name"),
    ]

    operations = [migrations.RunPython(create, migrations.RunPython.noop)]
