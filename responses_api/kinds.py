"""The kinds of generations of this API (see ``inference_site.runs.kinds``)."""

from __future__ import annotations

from inference_site.runs import kinds
from inference_site.runs.kinds import GenerationKind
from inference_site.runs.streams.request_documents import Assembly, Document
from responses_api.assembler import (
    COMPACTION,
    INPUT_TOKENS,
    RESPONSE,
    CompactionAssembler,
    CompactionAssembly,
    InputTokensAssembler,
    ResponseAssembler,
    ResponseAssembly,
    failure,
)
from responses_api.storage import store_result
from responses_api.stored_responses import is_deleted, recover, replay_of


def _rebuild(generation_id: str) -> Document[ResponseAssembly] | None:
    # Imported here, because it imports the whole handling of requests, which workers do not use.
    from responses_api.creation import rebuild

    return rebuild(generation_id)


KINDS = {
    RESPONSE: GenerationKind(
        ResponseAssembly,
        ResponseAssembler,
        failure,
        store_result,
        recover,
        _rebuild,
        replay_of,
        is_deleted,
    ),
    COMPACTION: GenerationKind(CompactionAssembly, CompactionAssembler, kinds.failure),
    INPUT_TOKENS: GenerationKind(Assembly, InputTokensAssembler, kinds.failure),
}
