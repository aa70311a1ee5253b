from django.apps import AppConfig


class CompletionsConfig(AppConfig):
    """Chat completions and models, as OpenAI's API has them."""

    name = "completions"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Declare the kinds of generations of this API."""
        from inference_site.generations.kinds import register

        for kind in ("chat.completion", "text_completion", "embedding", "tokens"):
            register(kind, "completions.kinds.KINDS")
