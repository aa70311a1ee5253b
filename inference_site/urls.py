"""Routes of the whole site."""

from django.contrib import admin
from django.urls import include, path

from inference_site.http.health import HealthView, ReadyView

urlpatterns = [
    path("v1/", include("completions.urls")),
    path("health", HealthView.as_view()),
    path("health/ready", ReadyView.as_view()),
    path("admin/", admin.site.urls),
]
