from django.apps import AppConfig


class WorkerConfig(AppConfig):
    """The worker process: engines, and the Celery task that runs generations."""

    name = "worker"
    default_auto_field = "django.db.models.BigAutoField"
