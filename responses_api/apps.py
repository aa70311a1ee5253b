from django.apps import AppConfig


class ResponsesApiConfig(AppConfig):
    """Responses and conversations, as OpenAI's API has them."""

    name = "responses_api"
    verbose_name = "Responses"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Tell the worker how the generations of this API are assembled, kept and recovered."""
        from inference_site.generations import whole_answer
        from inference_site.generations.kinds import Kind, register
        from responses_api.assembler import RESPONSE, ResponseAssembler, failure
        from responses_api.compaction import COMPACTION, CompactionAssembler
        from responses_api.counting import INPUT_TOKENS, CountAssembler
        from responses_api.recovery import rebuild, recover
        from responses_api.storage import settle

        kind = Kind(ResponseAssembler.from_assembly, failure, settle, recover, rebuild)
        register(RESPONSE, kind)
        register(COMPACTION, Kind(CompactionAssembler.from_assembly, whole_answer.failure))
        register(INPUT_TOKENS, Kind(CountAssembler.from_assembly, whole_answer.failure))
