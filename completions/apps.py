from django.apps import AppConfig


class CompletionsConfig(AppConfig):
    """Chat completions and models, as OpenAI's API has them."""

    name = "completions"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Tell the worker how the generations of this API are assembled."""
        from completions.assembler import CHAT, ChatAssembler
        from completions.completion_assembler import COMPLETION, CompletionAssembler
        from completions.embedding_assembler import EMBEDDING, EmbeddingAssembler
        from completions.storage import settle
        from completions.token_assembler import TOKENS, TokenAssembler
        from inference_site.generations.kinds import Kind, register
        from inference_site.generations.whole_answer import failure

        register(CHAT, Kind(ChatAssembler.from_assembly, failure, settle))
        register(COMPLETION, Kind(CompletionAssembler.from_assembly, failure))
        register(EMBEDDING, Kind(EmbeddingAssembler.from_assembly, failure))
        register(TOKENS, Kind(TokenAssembler.from_assembly, failure))
