"""The kinds of generations of this API (see ``inference_site.generations.kinds``)."""

from __future__ import annotations

from inference_site.generations import whole_answer
from inference_site.generations.kinds import Kind
from inference_site.streams.request_documents import Assembly, Document
from responses_api.assembler import (
    COMPACTION,
    INPUT_TOKENS,
    RESPONSE,
    CompactionAssembler,
    CompactionAssembly,
    InputTokensAssembler,
    ResponseAssembly,
    failure,
)
from responses_api.storage import store_result
from responses_api.stored_responses import find_replay, is_deleted, recover


def _rebuild(generation_id: str) -> Document[ResponseAssembly] | None:
    # Imported here, because it imports the whole handling of requests, which workers do not use.
    from responses_api.creation import rebuild

    return rebuild(generation_id)


KINDS = {
    RESPONSE: Kind(
        ResponseAssembly,
        ResponseAssembly.assembler,
        failure,
        store_result,
        recover,
        _rebuild,
        find_replay,
        is_deleted,
    ),
    COMPACTION: Kind(CompactionAssembly, CompactionAssembler, whole_answer.failure),
    INPUT_TOKENS: Kind(Assembly, InputTokensAssembler, whole_answer.failure),
}
