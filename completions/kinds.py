"""The kinds of generations of this app, with their assemblers and their storage."""

from completions.anthropic.assembler import (
    INPUT_TOKENS,
    MESSAGE,
    InputTokensAssembler,
    MessageAssembler,
    MessageAssembly,
)
from completions.anthropic.assembler import failure as message_failure
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
from inference_site.streams.request_documents import Assembly

KINDS = {
    CHAT: Kind(ChatAssembly, ChatAssembler, failure, store_result, replay=replay_of),
    COMPLETION: Kind(CompletionAssembly, CompletionAssembler, failure),
    EMBEDDING: Kind(EmbeddingAssembly, EmbeddingAssembler, failure),
    INFILL: Kind(InfillAssembly, InfillAssembler, failure),
    INPUT_TOKENS: Kind(Assembly, InputTokensAssembler, message_failure),
    MESSAGE: Kind(MessageAssembly, MessageAssembler, message_failure),
    OLLAMA: Kind(OllamaAssembly, OllamaAssembler, ollama_failure, lines=True),
    OLLAMA_EMBEDDING: Kind(OllamaEmbeddingAssembly, OllamaEmbeddingAssembler, ollama_failure),
    TOKENS: Kind(TokenAssembly, TokenAssembler, failure),
}
