from django.apps import AppConfig


class CasesConfig(AppConfig):
    """Sets of saved cases and their runs."""

    name = "inference_site.cases"
    default_auto_field = "django.db.models.BigAutoField"
    forgetting = "inference_site.cases.models"
    transfer = "inference_site.cases.transfer"
