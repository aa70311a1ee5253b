"""Routes under /v1."""

from django.urls import path

from responses_api.context_views import CompactView, InputTokensView
from responses_api.conversations import ConversationsView, ConversationView, ItemsView, ItemView
from responses_api.views import CancelView, InputItemsView, ResponsesView, ResponseView

urlpatterns = [
    path("responses", ResponsesView.as_view()),
    path("responses/compact", CompactView.as_view()),
    path("responses/input_tokens", InputTokensView.as_view()),
    path("responses/<str:response_id>", ResponseView.as_view()),
    path("responses/<str:response_id>/cancel", CancelView.as_view()),
    path("responses/<str:response_id>/input_items", InputItemsView.as_view()),
    path("conversations", ConversationsView.as_view()),
    path("conversations/<str:conversation_id>", ConversationView.as_view()),
    path("conversations/<str:conversation_id>/items", ItemsView.as_view()),
    path("conversations/<str:conversation_id>/items/<str:item_id>", ItemView.as_view()),
]
