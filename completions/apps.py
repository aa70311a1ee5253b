from django.apps import AppConfig


class CompletionsConfig(AppConfig):
    """Chat completions and models, as OpenAI's API has them."""

    name = "completions"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Declare how the generations of this API are assembled and kept."""
        from completions.assemblers.chat import CHAT, ChatAssembler, ChatAssembly
        from completions.assemblers.completion import (
            COMPLETION,
            CompletionAssembler,
            CompletionAssembly,
        )
        from completions.assemblers.embedding import (
            EMBEDDING,
            EmbeddingAssembler,
            EmbeddingAssembly,
        )
        from completions.assemblers.token import TOKENS, TokenAssembler, TokenAssembly
        from completions.storage import store_result
        from inference_site.generations.kinds import Kind, register
        from inference_site.generations.whole_answer import failure

        register(CHAT, Kind(ChatAssembly, ChatAssembler, failure, store_result))
        register(COMPLETION, Kind(CompletionAssembly, CompletionAssembler, failure))
        register(EMBEDDING, Kind(EmbeddingAssembly, EmbeddingAssembler, failure))
        register(TOKENS, Kind(TokenAssembly, TokenAssembler, failure))
