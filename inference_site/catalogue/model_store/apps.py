from django.apps import AppConfig


class ModelStoreConfig(AppConfig):
    """Models that operators keep in the database, and their pulls from a hub."""

    name = "inference_site.catalogue.model_store"
    label = "model_store"
    verbose_name = "Models"
    default_auto_field = "django.db.models.BigAutoField"
