from django.apps import AppConfig


class InferenceSiteConfig(AppConfig):
    """The project itself: its management commands."""

    name = "inference_site"
