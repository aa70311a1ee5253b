"""Routes of the usage API."""

from django.urls import path

from inference_site.usage.views import OrganizationUsageView, ProjectUsageView

urlpatterns = [
    path("usage", ProjectUsageView.as_view()),
    path("organization/usage/completions", OrganizationUsageView.as_view()),
]
