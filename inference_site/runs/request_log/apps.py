from django.apps import AppConfig


class RequestLogConfig(AppConfig):
    """Requests that were refused, and the filters that users keep for the request log."""

    name = "inference_site.runs.request_log"
    label = "request_log"
    default_auto_field = "django.db.models.BigAutoField"
