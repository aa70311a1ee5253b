"""Routes of the playground beside its page."""

from django.urls import path

from inference_site.console.playground.views import (
    OpenView,
    PlaygroundResponsesView,
    PlaygroundResponseView,
    PlaygroundStopView,
    PresetsView,
    PresetView,
)

requests = [
    path("responses", PlaygroundResponsesView.as_view()),
    path("responses/<str:response_id>/stop", PlaygroundStopView.as_view()),
]
"""Under ``/console/playground/``, which the relay serves: what generates, and what ends that."""

pages = [
    path("responses/<str:response_id>", PlaygroundResponseView.as_view()),
    path("presets", PresetsView.as_view()),
    path("presets/<int:pk>", PresetView.as_view()),
    path("open/<str:public_id>", OpenView.as_view()),
]
"""Under ``/admin/playground/``, like the page: what is stored. No load of the API refuses it."""
