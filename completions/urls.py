"""Routes under /v1, and those of Ollama's API under /api."""

from django.urls import path

from completions.anthropic.batches import (
    MessageBatchCancelView,
    MessageBatchesView,
    MessageBatchResultsView,
    MessageBatchView,
)
from completions.anthropic.views import CountTokensView, MessagesView
from completions.ollama.models import PsView, PullView, ShowView, TagsView, VersionView
from completions.ollama.views import ChatView, EmbedView, GenerateView, SingleEmbedView
from completions.views.audio import SpeechView, TranscriptionsView, TranslationsView
from completions.views.chat import (
    ChatCompletionsView,
    CompletionsView,
    StoredCompletionFeedbackView,
    StoredCompletionView,
    StoredMessagesView,
)
from completions.views.models import (
    LoadAdapterView,
    ModelEventsView,
    ModelLoadView,
    ModelsView,
    ModelUnloadView,
    ModelView,
    UnloadAdapterView,
)
from completions.views.scores import ModerationsView, RerankView, ScoreView
from completions.views.tokens import (
    DetokenizeView,
    EmbeddingsView,
    RenderView,
    TokenizerInfoView,
    TokenizeView,
)

urlpatterns = [
    path("audio/speech", SpeechView.as_view()),
    path("audio/transcriptions", TranscriptionsView.as_view()),
    path("audio/translations", TranslationsView.as_view()),
    path("chat/completions", ChatCompletionsView.as_view()),
    path("chat/completions/<str:completion_id>", StoredCompletionView.as_view()),
    path("chat/completions/<str:completion_id>/feedback", StoredCompletionFeedbackView.as_view()),
    path("chat/completions/<str:completion_id>/messages", StoredMessagesView.as_view()),
    path("chat/render", RenderView.as_view()),
    path("completions", CompletionsView.as_view()),
    path("detokenize", DetokenizeView.as_view()),
    path("embeddings", EmbeddingsView.as_view()),
    path("load_lora_adapter", LoadAdapterView.as_view()),
    path("messages", MessagesView.as_view()),
    path("messages/batches", MessageBatchesView.as_view()),
    path("messages/batches/<str:message_batch_id>", MessageBatchView.as_view()),
    path("messages/batches/<str:message_batch_id>/cancel", MessageBatchCancelView.as_view()),
    path("messages/batches/<str:message_batch_id>/results", MessageBatchResultsView.as_view()),
    path("messages/count_tokens", CountTokensView.as_view()),
    path("models", ModelsView.as_view()),
    path("models/load", ModelLoadView.as_view()),
    path("models/unload", ModelUnloadView.as_view()),
    path("models/<path:model_id>/events", ModelEventsView.as_view()),
    path("models/<path:model_id>", ModelView.as_view()),
    path("moderations", ModerationsView.as_view()),
    path("rerank", RerankView.as_view()),
    path("score", ScoreView.as_view()),
    path("tokenize", TokenizeView.as_view()),
    path("tokenizer_info", TokenizerInfoView.as_view()),
    path("unload_lora_adapter", UnloadAdapterView.as_view()),
]

OLLAMA = [
    path("chat", ChatView.as_view()),
    path("embed", EmbedView.as_view()),
    path("embeddings", SingleEmbedView.as_view()),
    path("generate", GenerateView.as_view()),
    path("ps", PsView.as_view()),
    path("pull", PullView.as_view()),
    path("show", ShowView.as_view()),
    path("tags", TagsView.as_view()),
    path("version", VersionView.as_view()),
]
