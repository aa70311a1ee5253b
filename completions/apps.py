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
    batch_endpoints = {
        "/v1/chat/completions": (
            "completions.wire.chat.ChatCompletionRequest",
            "completions.views.chat.chat_submission",
            {"service_tier": None},
        ),
        "/v1/completions": (
            "completions.wire.completion.CompletionRequest",
            "completions.views.chat.completion_submission",
            {},
        ),
        "/v1/embeddings": (
            "completions.wire.tokens.EmbeddingRequest",
            "completions.views.tokens.embedding_submission",
            {},
        ),
        "/v1/moderations": (
            "completions.wire.scores.ModerationRequest",
            "completions.views.scores.moderation_submission",
            {},
        ),
        "/v1/messages": (
            "completions.anthropic.wire.MessagesRequest",
            "completions.anthropic.views.message_submission",
            {"service_tier": "standard_only"},
            "anthropic",
        ),
    }
    retention = "completions.storage"
    forgetting = "completions.storage"
    naming = "completions.storage"
    transfer = "completions.transfer"
    stored_as = {"chatcmpl-": "storedcompletion"}
