"""Routes under /v1."""

from django.urls import path

from completions.stored_views import StoredCompletionView, StoredMessagesView
from completions.views import ChatCompletionsView, CompletionsView, ModelsView, ModelView

urlpatterns = [
    path("chat/completions", ChatCompletionsView.as_view()),
    path("chat/completions/<str:completion_id>", StoredCompletionView.as_view()),
    path("chat/completions/<str:completion_id>/messages", StoredMessagesView.as_view()),
    path("completions", CompletionsView.as_view()),
    path("models", ModelsView.as_view()),
    path("models/<path:model_id>", ModelView.as_view()),
]
