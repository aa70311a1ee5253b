"""Routes under /v1, and those under /console for pages of the admin."""

from django.urls import path

from responses_api.views.conversations import (
    ConversationItemsView,
    ConversationItemView,
    ConversationsView,
    ConversationView,
)
from responses_api.views.responses import (
    ResponseCancelView,
    ResponseCompactView,
    ResponseFeedbackView,
    ResponseInputItemsView,
    ResponseInputTokensView,
    ResponsesView,
    ResponseView,
    WatchView,
)

urlpatterns = [
    path("responses", ResponsesView.as_view()),
    path("responses/compact", ResponseCompactView.as_view()),
    path("responses/input_tokens", ResponseInputTokensView.as_view()),
    path("responses/<str:response_id>", ResponseView.as_view()),
    path("responses/<str:response_id>/cancel", ResponseCancelView.as_view()),
    path("responses/<str:response_id>/feedback", ResponseFeedbackView.as_view()),
    path("responses/<str:response_id>/input_items", ResponseInputItemsView.as_view()),
    path("conversations", ConversationsView.as_view()),
    path("conversations/<str:conversation_id>", ConversationView.as_view()),
    path("conversations/<str:conversation_id>/items", ConversationItemsView.as_view()),
    path("conversations/<str:conversation_id>/items/<str:item_id>", ConversationItemView.as_view()),
]

CONSOLE = [
    path("responses/<str:response_id>/events", WatchView.as_view(), name="response-events"),
]
