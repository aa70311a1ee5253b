"""Routes of the playground page, and of the requests under /console that pages send."""

from django.urls import include, path

from inference_site.console.playground import (
    PlaygroundResponsesView,
    PlaygroundStopView,
    playground,
)

urlpatterns = [
    path("playground", playground, name="playground"),
    path("console/", include("responses_api.console_urls")),
    path("console/playground/responses", PlaygroundResponsesView.as_view()),
    path("console/playground/responses/<str:response_id>/stop", PlaygroundStopView.as_view()),
]
