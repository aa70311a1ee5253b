"""Routes under /v1."""

from django.urls import path

from responses_api.views import CancelView, InputItemsView, ResponsesView, ResponseView

urlpatterns = [
    path("responses", ResponsesView.as_view()),
    path("responses/<str:response_id>", ResponseView.as_view()),
    path("responses/<str:response_id>/cancel", CancelView.as_view()),
    path("responses/<str:response_id>/input_items", InputItemsView.as_view()),
]
