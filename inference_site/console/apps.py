"""Two Django applications: the console, and the admin with the console's site."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig, apps
from django.contrib.admin.apps import SimpleAdminConfig
from django.contrib.admin.checks import check_admin_app, check_dependencies
from django.core import checks


class ConsoleConfig(AppConfig):
    """Pages, templates and static files of the console."""

    name = "inference_site.console"

    def ready(self) -> None:
        """Call what others have made by the words of the menu.

        Their migrations do not notice: these read the options as they were given.
        """
        from axes.models import AccessFailureLog
        from django.contrib.admin.models import LogEntry
        from django.contrib.auth.models import Group

        for app in ("accounts", "auth", "admin", "axes"):
            apps.get_app_config(app).verbose_name = "Access"
        for model, one, many in (
            (Group, "role", "roles"),
            (LogEntry, "entry of the audit log", "audit log"),
            (AccessFailureLog, "failed login", "failed logins"),
        ):
            model._meta.verbose_name, model._meta.verbose_name_plural = one, many


class SiteAdminConfig(SimpleAdminConfig):
    """Django's admin, whose models are registered with the console's site.

    The routes of the site (``inference_site/urls.py``) have them registered: processes that serve
    no pages do not import what the admin is made of.
    """

    default_site = "inference_site.console.site.ConsoleSite"

    def ready(self) -> None:
        """Declare the checks that Django has for the admin."""
        checks.register(check_dependencies, checks.Tags.admin)
        checks.register(_check_registered, checks.Tags.admin)


def _check_registered(app_configs: Any, **options: Any) -> list[checks.CheckMessage]:
    """Check the admin of all models, registered by now or not."""
    from django.contrib import admin

    admin.autodiscover()
    found: list[checks.CheckMessage] = check_admin_app(app_configs, **options)
    return found
