from django.apps import AppConfig


class SiteSettingsConfig(AppConfig):
    """Settings that operators change while the site runs."""

    name = "inference_site.core.site_settings"
    label = "site_settings"
    verbose_name = "Settings"
    default_auto_field = "django.db.models.BigAutoField"
