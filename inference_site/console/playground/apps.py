from django.apps import AppConfig


class PlaygroundConfig(AppConfig):
    """The page on which staff try the models, and the presets that they save."""

    name = "inference_site.console.playground"
    label = "playground"
    default_auto_field = "django.db.models.BigAutoField"
