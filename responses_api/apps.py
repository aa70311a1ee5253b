from django.apps import AppConfig


class ResponsesApiConfig(AppConfig):
    """Responses and conversations, as OpenAI's API has them."""

    name = "responses_api"
    verbose_name = "Responses"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Declare how the generations of this API are assembled, kept and recovered."""
        from inference_site.generations.kinds import Kind, register
        from inference_site.generations.whole_answer import failure
        from inference_site.streams.request_documents import Assembly
        from responses_api.output import assembler
        from responses_api.request.compaction import (
            COMPACTION,
            CompactionAssembler,
            CompactionAssembly,
        )
        from responses_api.request.counting import INPUT_TOKENS, CountAssembler
        from responses_api.request.creation import ResponseAssembly
        from responses_api.request.mending import contradictions, mend
        from responses_api.request.recovery import rebuild, recover
        from responses_api.state.replay import is_deleted, replay_of
        from responses_api.state.storage import store_result

        kind = Kind(
            ResponseAssembly,
            ResponseAssembly.assembler,
            assembler.failure,
            store_result,
            recover,
            rebuild,
            replay_of,
            is_deleted,
            contradictions,
            mend,
        )
        register(assembler.RESPONSE, kind)
        register(COMPACTION, Kind(CompactionAssembly, CompactionAssembler, failure))
        register(INPUT_TOKENS, Kind(Assembly, CountAssembler, failure))
