from django.apps import AppConfig


class WorkerConfig(AppConfig):
    """What a GPU host runs."""

    name = "worker"
    default_auto_field = "django.db.models.BigAutoField"
