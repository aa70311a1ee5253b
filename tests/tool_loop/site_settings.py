"""The settings of a site that has one more tool (tests/tool_loop/apps.py)."""

from __future__ import annotations

from tests.site_settings import *  # noqa: F403  # All of them.
from tests.site_settings import INSTALLED_APPS as _APPS

INSTALLED_APPS = [*_APPS, "tests.tool_loop.apps.CountedToolConfig"]
