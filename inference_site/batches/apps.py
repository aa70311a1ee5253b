from django.apps import AppConfig


class BatchesConfig(AppConfig):
    """Batches of requests."""

    name = "inference_site.batches"
    default_auto_field = "django.db.models.BigAutoField"
    delivery = "inference_site.batches.models"
    retention = "inference_site.batches.models"
    forgetting = "inference_site.batches.models"
    transfer = "inference_site.batches.transfer"
