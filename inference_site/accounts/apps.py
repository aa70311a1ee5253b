from django.apps import AppConfig


class AccountsConfig(AppConfig):
    """Projects and their API keys, limits and budgets."""

    name = "inference_site.accounts"
    label = "accounts"
    default_auto_field = "django.db.models.BigAutoField"
