"""Three Django apps: the console, and Django's admin and static files as the console has them."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig, apps
from django.contrib.admin.apps import SimpleAdminConfig
from django.contrib.admin.checks import check_admin_app, check_dependencies
from django.contrib.staticfiles.apps import StaticFilesConfig
from django.core import checks


class ConsoleConfig(AppConfig):
    """Pages, templates and static files of the console."""

    name = "inference_site.console"

    def ready(self) -> None:
        """Name apps and models of other packages with the words of the menu.

        ``makemigrations`` compares the options of their class, not these, and so finds no change.
        """
        from axes.models import AccessFailureLog
        from django.contrib.admin.models import LogEntry
        from django.contrib.auth.models import Group

        for app in ("accounts", "mcp_servers", "auth", "admin", "axes"):
            apps.get_app_config(app).verbose_name = "Access"
        for model, one, many in (
            (Group, "role", "roles"),
            (LogEntry, "entry of the audit log", "audit log"),
            (AccessFailureLog, "failed login", "failed logins"),
        ):
            model._meta.verbose_name, model._meta.verbose_name_plural = one, many


class StaticFilesOfPages(StaticFilesConfig):
    """Static files, of which ``collectstatic`` leaves out those that no page of the site names."""

    ignore_patterns = [  # As the base class has it.
        *StaticFilesConfig.ignore_patterns,
        *("rest_framework", "redoc", "swagger-ui-es-*", "swagger-ui.js*"),
    ]


class SiteAdminConfig(SimpleAdminConfig):
    """Django's admin app with the console's site.

    It does not import the admin modules of all apps: ``inference_site/urls.py`` does, so that only
    processes that serve pages load them.
    """

    default_site = "inference_site.console.site.ConsoleSite"

    def ready(self) -> None:
        """Register Django's checks of the admin."""
        checks.register(check_dependencies, checks.Tags.admin)
        checks.register(_check_model_admins, checks.Tags.admin)


def _check_model_admins(app_configs: Any, **options: Any) -> list[checks.CheckMessage]:
    """Import the admin modules of all apps, and check them."""
    from django.contrib import admin

    admin.autodiscover()
    found: list[checks.CheckMessage] = check_admin_app(app_configs, **options)
    return found
