from django.apps import AppConfig


class ResponsesApiConfig(AppConfig):
    """Responses and conversations, as OpenAI's API has them."""

    name = "responses_api"
    verbose_name = "Responses"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Declare the kinds of generations of this API."""
        from inference_site.generations.kinds import register

        for kind in ("response", "response.compaction", "response.input_tokens"):
            register(kind, "responses_api.kinds.KINDS")
