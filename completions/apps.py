from django.apps import AppConfig


class CompletionsConfig(AppConfig):
    """Chat completions, completions, embeddings and models."""

    name = "completions"
    verbose_name = "Chat completions"
    default_auto_field = "django.db.models.BigAutoField"
    kinds = (
        "chat.completion",
        "text_completion",
        "embedding",
        "infill",
        "tokens",
        "message",
        "message.input_tokens",
        "rerank",
        "score",
        "moderation",
        "speech",
        "speech.events",
        "transcription",
        "translation",
        "ollama",
        "ollama.embedding",
    )
    retention = "completions.storage"
    forgetting = "completions.storage"
    stored_as = {"chatcmpl-": "storedcompletion"}
