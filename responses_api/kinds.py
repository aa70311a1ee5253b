"""How the generations of this API are assembled, kept and recovered."""

from __future__ import annotations

from inference_site.generations.kinds import Assembler, Kind
from inference_site.generations.whole_answer import failure
from inference_site.streams.batches import Sent
from inference_site.streams.request_documents import Assembly, Document
from responses_api import assembler
from responses_api.assembler import (
    COMPACTION,
    INPUT_TOKENS,
    RESPONSE,
    CompactionAssembler,
    CompactionAssembly,
    CountAssembler,
    ResponseAssembly,
)
from responses_api.storage import store_result
from responses_api.stored_responses import is_deleted, replay_of


def _recover(generation_id: str, sent: Sent) -> Assembler | None:
    # It imports all that makes a request, which workers have no other use for.
    from responses_api.stored_responses import recover

    return recover(generation_id, sent)


def _rebuild(generation_id: str) -> Document[ResponseAssembly] | None:
    from responses_api.creation import rebuild

    return rebuild(generation_id)


KINDS = {
    RESPONSE: Kind(
        ResponseAssembly,
        ResponseAssembly.assembler,
        assembler.failure,
        store_result,
        _recover,
        _rebuild,
        replay_of,
        is_deleted,
    ),
    COMPACTION: Kind(CompactionAssembly, CompactionAssembler, failure),
    INPUT_TOKENS: Kind(Assembly, CountAssembler, failure),
}
