"""Routes of the whole site."""

from django.contrib import admin
from django.urls import include, path
from django.views.generic import RedirectView
from drf_spectacular.views import SpectacularSwaggerView

from inference_site.http.health import HealthView, ReadyView
from inference_site.http.openapi import OpenApiView

admin.site.site_header = admin.site.site_title = "Inference site"
admin.site.index_title = "Operation"
admin.site.site_url = None  # No link: the site is an API.

urlpatterns = [
    path("", RedirectView.as_view(pattern_name="admin:index")),
    path("v1/openapi.json", OpenApiView.as_view(), name="openapi"),
    path("v1/", include("completions.urls")),
    path("v1/", include("responses_api.urls")),
    path("health", HealthView.as_view()),
    path("health/ready", ReadyView.as_view()),
    path("docs", SpectacularSwaggerView.as_view(url_name="openapi")),
    path("admin/", admin.site.urls),
]
