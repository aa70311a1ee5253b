from django.apps import AppConfig


class AlarmsConfig(AppConfig):
    """Rules that beat evaluates, and the alarms that they raise."""

    name = "inference_site.console.alarms"
    label = "alarms"
    default_auto_field = "django.db.models.BigAutoField"
