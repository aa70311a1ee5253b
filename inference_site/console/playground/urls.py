"""Routes under ``/console/playground/``: the requests that the page sends."""

from django.urls import path

from inference_site.console.playground.opening import OpenView
from inference_site.console.playground.presets import PresetsView, PresetView
from inference_site.console.playground.responses import (
    PlaygroundResponsesView,
    PlaygroundResponseView,
    PlaygroundStopView,
)

urlpatterns = [
    path("responses", PlaygroundResponsesView.as_view()),
    path("responses/<str:response_id>", PlaygroundResponseView.as_view()),
    path("responses/<str:response_id>/stop", PlaygroundStopView.as_view()),
    path("presets", PresetsView.as_view()),
    path("presets/<int:pk>", PresetView.as_view()),
    path("open/<str:public_id>", OpenView.as_view()),
]
