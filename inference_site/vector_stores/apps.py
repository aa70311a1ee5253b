from django.apps import AppConfig


class VectorStoresConfig(AppConfig):
    """Vector stores, which the tool ``file_search`` and their own endpoint search."""

    name = "inference_site.vector_stores"
    verbose_name = "Vector stores"
    default_auto_field = "django.db.models.BigAutoField"
    kinds = ("vector_store.embedding", "vector_store.search")
    retention = "inference_site.vector_stores.models"
    transfer = "inference_site.vector_stores.transfer"
