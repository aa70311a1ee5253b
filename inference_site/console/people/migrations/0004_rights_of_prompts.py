from importlib import import_module

from django.db import migrations

_ROLES = import_module("inference_site.console.people.migrations.0002_roles")
_EARLIER = import_module("inference_site.console.people.migrations.0003_rights_of_presets")
_MODELS = ("prompttemplate", "promptversion")
_MODELS_BEFORE = ("storedresponse", "conversation", "item")
_OPERATOR = {
    *(f"responses_api.{action}_prompttemplate" for action in ("view", "add", "change", "delete")),
    "responses_api.view_promptversion",
}


def give(apps, schema_editor):
    """Give roles the permissions of prompt templates.

    A role from which a site has taken something stays as it is.
    """
    _ROLES._create_permissions()
    groups = apps.get_model("auth", "Group").objects
    permissions = apps.get_model("auth", "Permission").objects
    of_app = permissions.filter(content_type__app_label="responses_api")
    new = of_app.filter(content_type__model__in=_MODELS)
    before = of_app.filter(content_type__model__in=_MODELS_BEFORE)
    administrator = groups.filter(name="administrator").first()
    if administrator and not before.exclude(group=administrator).exists():
        administrator.permissions.add(*new)
    operator = groups.filter(name="operator").first()
    if operator and set(_ROLES.OPERATOR) <= _EARLIER._names(operator.permissions):
        operator.permissions.add(*(one for one in new if _EARLIER._name(one) in _OPERATOR))


class Migration(migrations.Migration):

    dependencies = [
        ("people", "0003_rights_of_presets"),
        ("responses_api", "0006_prompt_templates"),
    ]

    operations = [migrations.RunPython(give, migrations.RunPython.noop)]
