"""Routes of the requests that pages of the console send, and a short address of the playground."""

from django.urls import include, path
from django.views.generic import RedirectView

from inference_site.console.playground import views
from responses_api.urls import CONSOLE

urlpatterns = [
    path("playground", RedirectView.as_view(pattern_name="admin:playground", query_string=True)),
    # Below /admin: reads of stored data, which a busy API does not refuse.
    path("admin/playground/responses/<str:response_id>", views.PlaygroundResponseView.as_view()),
    path(
        "admin/playground/responses/<str:response_id>/feedback",
        views.PlaygroundFeedbackView.as_view(),
    ),
    path("admin/playground/presets", views.PresetsView.as_view()),
    path("admin/playground/presets/<int:pk>", views.PresetView.as_view()),
    path("admin/playground/open/<str:public_id>", views.OpenView.as_view()),
    # Below /console, which the relay serves: requests that start, stop and follow runs.
    path("console/", include(CONSOLE)),
    path("console/playground/responses", views.PlaygroundResponsesView.as_view()),
    path("console/playground/responses/<str:response_id>/stop", views.PlaygroundStopView.as_view()),
]
