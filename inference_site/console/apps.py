"""Two Django applications: the console, and the admin with the console's site."""

from __future__ import annotations

from django.apps import AppConfig
from django.contrib.admin.apps import AdminConfig


class ConsoleConfig(AppConfig):
    """Pages, templates and static files of the console."""

    name = "inference_site.console"


class SiteAdminConfig(AdminConfig):
    """Django's admin, whose models are registered with the console's site."""

    default_site = "inference_site.console.site.ConsoleSite"
