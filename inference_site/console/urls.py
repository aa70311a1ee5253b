"""Routes of the requests under /console that pages send, and a short address of the playground."""

from django.urls import include, path
from django.views.generic import RedirectView

urlpatterns = [
    path("playground", RedirectView.as_view(pattern_name="admin:playground", query_string=True)),
    path("console/", include("responses_api.console_urls")),
    path("console/playground/", include("inference_site.console.playground.urls")),
]
