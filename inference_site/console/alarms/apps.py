from django.apps import AppConfig


class AlarmsConfig(AppConfig):
    """Rules that beat evaluates, alarms that they raise, and notices to recipients."""

    name = "inference_site.console.alarms"
    label = "alarms"
    default_auto_field = "django.db.models.BigAutoField"
