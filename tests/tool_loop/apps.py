"""The app that has the counted tool in every process of a site."""

from __future__ import annotations

from django.apps import AppConfig


class CountedToolConfig(AppConfig):
    """Registers the tool."""

    name = "tests.tool_loop"
    label = "tests_tool_loop"

    def ready(self) -> None:
        """Register it; models can be imported only now."""
        from responses_api import site_tools
        from tests.tool_loop.counted_tool import TYPE, CountedTool, CountedToolType
        from worker.tools.base import register

        site_tools.register(CountedToolType())
        register(TYPE, CountedTool)
