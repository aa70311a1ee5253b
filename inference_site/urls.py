"""Routes of the whole site."""

from django.contrib import admin
from django.urls import include, path
from django.views.generic import RedirectView

from completions.urls import OLLAMA
from completions.views.chat import InfillView
from completions.views.models import AdaptersView
from completions.views.scores import RerankView
from completions.views.tokens import DetokenizeView, TokenizerInfoView, TokenizeView
from inference_site.batches.views import BatchCancelView, BatchesView, BatchView
from inference_site.gateway.api.documentation import OpenApiView, documentation
from inference_site.gateway.file_views import (
    FileContentView,
    FilesView,
    FileView,
    UploadCancelView,
    UploadCompleteView,
    UploadPartsView,
    UploadsView,
)
from inference_site.gateway.organization_views import (
    ModelPermissionsView,
    ProjectArchiveView,
    ProjectKeysView,
    ProjectKeyView,
    ProjectsView,
    ProjectView,
    RateLimitsView,
    RateLimitView,
    ServiceAccountsView,
    ServiceAccountView,
    SpendLimitView,
)
from inference_site.gateway.usage_views import (
    CodeInterpreterUsageView,
    CompletionsUsageView,
    EmbeddingsUsageView,
    ImagesUsageView,
    ModerationsUsageView,
    OrganizationCostsView,
    ProjectUsageView,
    SpeechesUsageView,
    TranscriptionsUsageView,
    VectorStoresUsageView,
)
from inference_site.ops.status import HealthView, ReadyView, VersionView, metrics
from inference_site.vector_stores.views import (
    FileBatchCancelView,
    FileBatchesView,
    FileBatchFilesView,
    FileBatchView,
    VectorStoreFileContentView,
    VectorStoreFilesView,
    VectorStoreFileView,
    VectorStoreSearchView,
    VectorStoresView,
    VectorStoreView,
)

admin.autodiscover()

_VECTOR_STORE = "v1/vector_stores/<str:vector_store_id>"
_FILE_BATCH = f"{_VECTOR_STORE}/file_batches/<str:file_batch_id>"

handler403 = "inference_site.console.error_pages.forbidden"
handler404 = "inference_site.console.error_pages.not_found"
handler500 = "inference_site.console.error_pages.failed"

urlpatterns = [
    path("", RedirectView.as_view(pattern_name="admin:index")),
    path("v1/openapi.json", OpenApiView.as_view(), name="openapi"),
    path("v1/usage", ProjectUsageView.as_view()),
    path("v1/files", FilesView.as_view()),
    path("v1/files/<str:file_id>", FileView.as_view()),
    path("v1/files/<str:file_id>/content", FileContentView.as_view()),
    path("v1/batches", BatchesView.as_view()),
    path("v1/batches/<str:batch_id>", BatchView.as_view()),
    path("v1/batches/<str:batch_id>/cancel", BatchCancelView.as_view()),
    path("v1/vector_stores", VectorStoresView.as_view()),
    path(_VECTOR_STORE, VectorStoreView.as_view()),
    path(f"{_VECTOR_STORE}/search", VectorStoreSearchView.as_view()),
    path(f"{_VECTOR_STORE}/files", VectorStoreFilesView.as_view()),
    path(f"{_VECTOR_STORE}/files/<str:file_id>", VectorStoreFileView.as_view()),
    path(f"{_VECTOR_STORE}/files/<str:file_id>/content", VectorStoreFileContentView.as_view()),
    path(f"{_VECTOR_STORE}/file_batches", FileBatchesView.as_view()),
    path(_FILE_BATCH, FileBatchView.as_view()),
    path(f"{_FILE_BATCH}/cancel", FileBatchCancelView.as_view()),
    path(f"{_FILE_BATCH}/files", FileBatchFilesView.as_view()),
    path("v1/uploads", UploadsView.as_view()),
    path("v1/uploads/<str:upload_id>/parts", UploadPartsView.as_view()),
    path("v1/uploads/<str:upload_id>/complete", UploadCompleteView.as_view()),
    path("v1/uploads/<str:upload_id>/cancel", UploadCancelView.as_view()),
    path("v1/organization/usage/completions", CompletionsUsageView.as_view()),
    path("v1/organization/usage/embeddings", EmbeddingsUsageView.as_view()),
    path("v1/organization/usage/moderations", ModerationsUsageView.as_view()),
    path("v1/organization/usage/audio_speeches", SpeechesUsageView.as_view()),
    path("v1/organization/usage/audio_transcriptions", TranscriptionsUsageView.as_view()),
    path("v1/organization/usage/images", ImagesUsageView.as_view()),
    path("v1/organization/usage/vector_stores", VectorStoresUsageView.as_view()),
    path(
        "v1/organization/usage/code_interpreter_sessions",
        CodeInterpreterUsageView.as_view(),
    ),
    path("v1/organization/costs", OrganizationCostsView.as_view()),
    path("v1/organization/projects", ProjectsView.as_view()),
    path("v1/organization/projects/<str:project_id>", ProjectView.as_view()),
    path("v1/organization/projects/<str:project_id>/archive", ProjectArchiveView.as_view()),
    path("v1/organization/projects/<str:project_id>/spend_limit", SpendLimitView.as_view()),
    path(
        "v1/organization/projects/<str:project_id>/model_permissions",
        ModelPermissionsView.as_view(),
    ),
    path("v1/organization/projects/<str:project_id>/rate_limits", RateLimitsView.as_view()),
    path(
        "v1/organization/projects/<str:project_id>/rate_limits/<path:rate_limit_id>",
        RateLimitView.as_view(),
    ),
    path("v1/organization/projects/<str:project_id>/api_keys", ProjectKeysView.as_view()),
    path(
        "v1/organization/projects/<str:project_id>/api_keys/<str:key_id>",
        ProjectKeyView.as_view(),
    ),
    path(
        "v1/organization/projects/<str:project_id>/service_accounts",
        ServiceAccountsView.as_view(),
    ),
    path(
        "v1/organization/projects/<str:project_id>/service_accounts/<str:key_id>",
        ServiceAccountView.as_view(),
    ),
    path("v1/", include("completions.urls")),
    path("v1/", include("responses_api.urls")),
    path("api/", include(OLLAMA)),
    path("lora-adapters", AdaptersView.as_view()),
    path("infill", InfillView.as_view()),
    path("tokenize", TokenizeView.as_view()),
    path("detokenize", DetokenizeView.as_view()),
    path("v2/rerank", RerankView.as_view()),
    path("tokenizer_info", TokenizerInfoView.as_view()),
    path("metrics", metrics),
    path("", include("inference_site.console.urls")),
    path("health", HealthView.as_view()),
    path("health/ready", ReadyView.as_view()),
    path("version", VersionView.as_view()),
    path("docs", documentation, name="docs"),
    path("admin/", admin.site.urls),
    # Browsers ask for it where a page names none.
    path("favicon.ico", RedirectView.as_view(url="/static/console/favicon.svg")),
]
