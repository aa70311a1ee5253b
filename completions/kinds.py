"""The kinds of generations of this app, with their assemblers and their storage."""

from completions.anthropic.assembler import (
    INPUT_TOKENS,
    MESSAGE,
    PING,
    InputTokensAssembler,
    MessageAssembly,
)
from completions.anthropic.assembler import failure as message_failure
from completions.anthropic.server_tool_assembler import message_assembler
from completions.assemblers.audio import (
    SPEECH,
    SPEECH_EVENTS,
    TRANSCRIPTION,
    TRANSLATION,
    AudioAssembly,
    SpeechAssembler,
    TranscriptAssembler,
    speech_failure,
)
from completions.assemblers.chat import CHAT, ChatAssembly
from completions.assemblers.completion import (
    COMPLETION,
    INFILL,
    CompletionAssembler,
    CompletionAssembly,
    InfillAssembler,
    InfillAssembly,
)
from completions.assemblers.scores import (
    MODERATION,
    RERANK,
    SCORE,
    ModerationAssembler,
    ModerationAssembly,
    RankingAssembly,
    RerankAssembler,
    ScoreAssembler,
)
from completions.assemblers.site_tools import chat_assembler
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
from inference_site.runs.kinds import GenerationKind, failure
from inference_site.runs.streams.request_documents import Assembly

KINDS = {
    CHAT: GenerationKind(ChatAssembly, chat_assembler, failure, store_result, replay=replay_of),
    COMPLETION: GenerationKind(CompletionAssembly, CompletionAssembler, failure),
    EMBEDDING: GenerationKind(EmbeddingAssembly, EmbeddingAssembler, failure),
    INFILL: GenerationKind(InfillAssembly, InfillAssembler, failure),
    INPUT_TOKENS: GenerationKind(Assembly, InputTokensAssembler, message_failure),
    MESSAGE: GenerationKind(MessageAssembly, message_assembler, message_failure, ping=PING),
    MODERATION: GenerationKind(ModerationAssembly, ModerationAssembler, failure),
    OLLAMA: GenerationKind(OllamaAssembly, OllamaAssembler, ollama_failure, form="lines"),
    OLLAMA_EMBEDDING: GenerationKind(
        OllamaEmbeddingAssembly, OllamaEmbeddingAssembler, ollama_failure
    ),
    RERANK: GenerationKind(RankingAssembly, RerankAssembler, failure),
    SPEECH: GenerationKind(AudioAssembly, SpeechAssembler, speech_failure, form="bytes"),
    SPEECH_EVENTS: GenerationKind(AudioAssembly, TranscriptAssembler, failure),
    TRANSCRIPTION: GenerationKind(AudioAssembly, TranscriptAssembler, failure),
    TRANSLATION: GenerationKind(AudioAssembly, TranscriptAssembler, failure),
    SCORE: GenerationKind(RankingAssembly, ScoreAssembler, failure),
    TOKENS: GenerationKind(TokenAssembly, TokenAssembler, failure),
}
