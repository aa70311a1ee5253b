"""Routes of the playground, of the playground's short address, and of responses in the console."""

from django.urls import include, path
from django.views.generic import RedirectView

from inference_site.console.playground.urls import pages, requests

urlpatterns = [
    path("playground", RedirectView.as_view(pattern_name="admin:playground", query_string=True)),
    path("admin/playground/", include(pages)),
    path("console/", include("responses_api.console_urls")),
    path("console/playground/", include(requests)),
]
