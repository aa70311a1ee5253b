from django.apps import AppConfig


class FilesConfig(AppConfig):
    """Files, and uploads in parts."""

    name = "inference_site.files"
    default_auto_field = "django.db.models.BigAutoField"
    retention = "inference_site.files.storage"
    transfer = "inference_site.files.transfer"
