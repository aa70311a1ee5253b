from django.apps import AppConfig


class GenerationsConfig(AppConfig):
    """The queue of record and the usage log."""

    name = "inference_site.runs"
    label = "generations"
    default_auto_field = "django.db.models.BigAutoField"
