from django.apps import AppConfig


class IdempotencyConfig(AppConfig):
    """Requests that were sent with an ``Idempotency-Key``, for a day."""

    name = "inference_site.gateway.idempotency"
    label = "idempotency"
    default_auto_field = "django.db.models.BigAutoField"
    retention = "inference_site.gateway.idempotency.models"
