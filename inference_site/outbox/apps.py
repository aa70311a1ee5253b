from django.apps import AppConfig


class OutboxConfig(AppConfig):
    """Endpoints, and the messages that go to them."""

    name = "inference_site.outbox"
    default_auto_field = "django.db.models.BigAutoField"
    retention = "inference_site.outbox.models"
