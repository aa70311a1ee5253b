"""Routes under /api."""

from django.urls import path

from completions.ollama.models import PsView, ShowView, TagsView, VersionView
from completions.ollama.pull import PullView
from completions.ollama.views import ChatView, EmbedView, GenerateView, SingleEmbedView

urlpatterns = [
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
