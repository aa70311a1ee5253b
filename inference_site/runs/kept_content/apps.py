from django.apps import AppConfig


class KeptContentConfig(AppConfig):
    """Prompts and answers that are kept some hours for debugging."""

    name = "inference_site.runs.kept_content"
    label = "kept_content"
    default_auto_field = "django.db.models.BigAutoField"
    retention = "inference_site.runs.kept_content.models"
    forgetting = "inference_site.runs.kept_content.models"
