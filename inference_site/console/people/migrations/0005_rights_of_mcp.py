from importlib import import_module

from django.db import migrations

_ROLES = import_module("inference_site.console.people.migrations.0002_roles")
_BEFORE = import_module("inference_site.console.people.migrations.0003_rights_of_presets")
VIEWER = ("responses_api.view_mcpapproval",)
OPERATOR = (
    *VIEWER,
    "mcp_servers.view_mcpserver",
    "mcp_servers.add_mcpserver",
    "mcp_servers.change_mcpserver",
    "mcp_servers.delete_mcpserver",
)


def give(apps, schema_editor):
    """Give roles the permissions of MCP servers and approvals."""
    give_new(apps, lambda name: name in OPERATOR, operator=OPERATOR, viewer=VIEWER)


def give_new(apps, is_new, operator=(), viewer=()):
    """Give the administrator all permissions whose names are new, and the other roles these.

    A role from which a site has taken something stays as it is.
    """
    _ROLES._create_permissions()
    permissions = apps.get_model("auth", "Permission").objects.select_related("content_type")
    new = [one for one in permissions.all() if is_new(_BEFORE._name(one))]
    # That of 0010 exists already when a site goes from an older release past this one.
    of_accounts = permissions.filter(content_type__app_label="accounts")
    of_accounts = of_accounts.exclude(codename="make_own_key")
    for role in apps.get_model("auth", "Group").objects.all():
        names = _BEFORE._names(role.permissions)
        if role.name == "administrator" and not of_accounts.exclude(group=role).exists():
            role.permissions.add(*new)
        elif role.name == "operator" and set(_ROLES.OPERATOR) <= names:
            role.permissions.add(*(one for one in new if _BEFORE._name(one) in operator))
        elif role.name == "viewer" and set(_ROLES.VIEWER) <= names:
            role.permissions.add(*(one for one in new if _BEFORE._name(one) in viewer))


class Migration(migrations.Migration):

    dependencies = [
        ("people", "0004_rights_of_prompts"),
        ("mcp_servers", "0001_initial"),
        ("responses_api", "0007_approvals_of_mcp_calls"),
    ]

    operations = [migrations.RunPython(give, migrations.RunPython.noop)]
