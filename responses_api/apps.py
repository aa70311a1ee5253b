from django.apps import AppConfig


class ResponsesApiConfig(AppConfig):
    """The API of responses and conversations."""

    name = "responses_api"
    verbose_name = "Responses"
    default_auto_field = "django.db.models.BigAutoField"
    kinds = ("response", "response.compaction", "response.input_tokens")
    batch_endpoints = {
        "/v1/responses": (
            "responses_api.wire.requests.ResponseRequest",
            "responses_api.creation.batch_submission",
            {"service_tier": None, "background": False},
        )
    }
    retention = "responses_api.deletion"
    forgetting = "responses_api.deletion"
    naming = "responses_api.deletion"
    transfer = "responses_api.transfer"
    mending = "responses_api.consistency"
    stored_as = {"resp_": "storedresponse"}
    content_permission = "responses_api.view_content"
