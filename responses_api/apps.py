from django.apps import AppConfig


class ResponsesApiConfig(AppConfig):
    """Responses and conversations, as OpenAI's API has them."""

    name = "responses_api"
    verbose_name = "Responses"
    default_auto_field = "django.db.models.BigAutoField"
    kinds = ("response", "response.compaction", "response.input_tokens")
    retention = "responses_api.deletion"
    mending = "responses_api.consistency"
