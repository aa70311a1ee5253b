from django.apps import AppConfig


class ToolCallsConfig(AppConfig):
    """Calls of tools that the site runs, and the turns before them."""

    name = "inference_site.runs.tool_calls"
    label = "tool_calls"
    default_auto_field = "django.db.models.BigAutoField"
    closing = "inference_site.runs.tool_calls.models"
