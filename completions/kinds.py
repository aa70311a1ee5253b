"""How the generations of this API are assembled and kept."""

from completions.assemblers.chat import CHAT, ChatAssembler, ChatAssembly
from completions.assemblers.completion import COMPLETION, CompletionAssembler, CompletionAssembly
from completions.assemblers.embedding import EMBEDDING, EmbeddingAssembler, EmbeddingAssembly
from completions.assemblers.infill import INFILL, InfillAssembler, InfillAssembly
from completions.assemblers.token import TOKENS, TokenAssembler, TokenAssembly
from completions.ollama.assembler import (
    OLLAMA,
    OLLAMA_EMBEDDING,
    OllamaAssembler,
    OllamaAssembly,
    OllamaEmbeddingAssembler,
    OllamaEmbeddingAssembly,
)
from completions.ollama.assembler import failure as ollama_failure
from completions.replay import replay_of
from completions.storage import store_result
from inference_site.generations.kinds import Kind, failure

KINDS = {
    CHAT: Kind(ChatAssembly, ChatAssembler, failure, store_result, replay=replay_of),
    COMPLETION: Kind(CompletionAssembly, CompletionAssembler, failure),
    EMBEDDING: Kind(EmbeddingAssembly, EmbeddingAssembler, failure),
    INFILL: Kind(InfillAssembly, InfillAssembler, failure),
    OLLAMA: Kind(OllamaAssembly, OllamaAssembler, ollama_failure, lines=True),
    OLLAMA_EMBEDDING: Kind(OllamaEmbeddingAssembly, OllamaEmbeddingAssembler, ollama_failure),
    TOKENS: Kind(TokenAssembly, TokenAssembler, failure),
}
