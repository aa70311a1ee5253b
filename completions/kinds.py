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
from inference_site.generations.kinds import GenerationKind, failure

KINDS = {
    CHAT: GenerationKind(ChatAssembly, ChatAssembler, failure, store_result, replay=replay_of),
    COMPLETION: GenerationKind(CompletionAssembly, CompletionAssembler, failure),
    EMBEDDING: GenerationKind(EmbeddingAssembly, EmbeddingAssembler, failure),
    INFILL: GenerationKind(InfillAssembly, InfillAssembler, failure),
    OLLAMA: GenerationKind(OllamaAssembly, OllamaAssembler, ollama_failure, lines=True),
    OLLAMA_EMBEDDING: GenerationKind(
        OllamaEmbeddingAssembly, OllamaEmbeddingAssembler, ollama_failure
    ),
    TOKENS: GenerationKind(TokenAssembly, TokenAssembler, failure),
}
