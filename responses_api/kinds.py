"""How the generations of this API are assembled, kept and recovered."""

from inference_site.generations.kinds import Kind
from inference_site.generations.whole_answer import failure
from inference_site.streams.request_documents import Assembly
from responses_api.output import assembler
from responses_api.request.compaction import COMPACTION, CompactionAssembler, CompactionAssembly
from responses_api.request.counting import INPUT_TOKENS, CountAssembler
from responses_api.request.creation import ResponseAssembly
from responses_api.request.recovery import rebuild, recover
from responses_api.state.storage import store_result

_RESPONSE = Kind(
    ResponseAssembly,
    ResponseAssembly.assembler,
    assembler.failure,
    store_result,
    recover,
    rebuild,
)

KINDS = {
    assembler.RESPONSE: _RESPONSE,
    COMPACTION: Kind(CompactionAssembly, CompactionAssembler, failure),
    INPUT_TOKENS: Kind(Assembly, CountAssembler, failure),
}
