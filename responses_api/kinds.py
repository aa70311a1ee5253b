"""How the generations of this API are assembled, kept and recovered."""

from __future__ import annotations

from inference_site.generations.kinds import Assembler, GenerationKind, failure
from inference_site.streams.batches import Sent
from inference_site.streams.request_documents import Assembly, Document
from responses_api.output import assembler
from responses_api.output.assembler import RESPONSE, ResponseAssembly
from responses_api.request.compaction import COMPACTION, CompactionAssembler, CompactionAssembly
from responses_api.request.counting import INPUT_TOKENS, CountAssembler
from responses_api.state.replay import is_deleted, replay_of
from responses_api.state.storage import store_result


def _recover(generation_id: str, sent: Sent) -> Assembler | None:
    # It imports all that makes a request, which workers have no other use for.
    from responses_api.request.recovery import recover

    return recover(generation_id, sent)


def _rebuild(generation_id: str) -> Document[ResponseAssembly] | None:
    from responses_api.request.recovery import rebuild

    return rebuild(generation_id)


KINDS = {
    RESPONSE: GenerationKind(
        ResponseAssembly,
        ResponseAssembly.assembler,
        assembler.failure,
        store_result,
        _recover,
        _rebuild,
        replay_of,
        is_deleted,
    ),
    COMPACTION: GenerationKind(CompactionAssembly, CompactionAssembler, failure),
    INPUT_TOKENS: GenerationKind(Assembly, CountAssembler, failure),
}
