"""Routes under /console, for pages of the admin."""

from django.urls import path

from responses_api.views.responses import WatchView

urlpatterns = [
    path("responses/<str:response_id>/events", WatchView.as_view(), name="response-events"),
]
