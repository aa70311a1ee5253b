"""Routes of the playground beside its page."""

from django.urls import path

from inference_site.console.playground import views

requests = [
    path("responses", views.PlaygroundResponsesView.as_view()),
    path("responses/<str:response_id>/stop", views.PlaygroundStopView.as_view()),
]
"""Under ``/console/playground/``, which the relay serves: requests that start and stop runs."""

pages = [
    path("responses/<str:response_id>", views.PlaygroundResponseView.as_view()),
    path("presets", views.PresetsView.as_view()),
    path("presets/<int:pk>", views.PresetView.as_view()),
    path("open/<str:public_id>", views.OpenView.as_view()),
]
"""Under ``/admin/playground/``, like the page: reads of stored data, never refused for load."""
