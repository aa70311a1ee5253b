"""How the generations of this API are assembled and kept."""

from completions.assemblers.chat import CHAT, ChatAssembler, ChatAssembly
from completions.assemblers.completion import (
    COMPLETION,
    INFILL,
    CompletionAssembler,
    CompletionAssembly,
    InfillAssembler,
    InfillAssembly,
)
from completions.assemblers.tokens import (
    EMBEDDING,
    TOKENS,
    EmbeddingAssembler,
    EmbeddingAssembly,
    TokenAssembler,
    TokenAssembly,
)
from completions.ollama.assembler import (
    OLLAMA,
    OLLAMA_EMBEDDING,
    OllamaAssembler,
    OllamaAssembly,
    OllamaEmbeddingAssembler,
    OllamaEmbeddingAssembly,
)
from completions.ollama.assembler import failure as ollama_failure
from completions.storage import replay_of, store_result
from inference_site.generations.kinds import Kind
from inference_site.generations.whole_answer import failure

KINDS = {
    CHAT: Kind(ChatAssembly, ChatAssembler, failure, store_result, replay=replay_of),
    COMPLETION: Kind(CompletionAssembly, CompletionAssembler, failure),
    EMBEDDING: Kind(EmbeddingAssembly, EmbeddingAssembler, failure),
    INFILL: Kind(InfillAssembly, InfillAssembler, failure),
    OLLAMA: Kind(OllamaAssembly, OllamaAssembler, ollama_failure, lines=True),
    OLLAMA_EMBEDDING: Kind(OllamaEmbeddingAssembly, OllamaEmbeddingAssembler, ollama_failure),
    TOKENS: Kind(TokenAssembly, TokenAssembler, failure),
}
