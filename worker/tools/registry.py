"""The tools that a worker can run, by the ``type`` in the options of a request's site-run tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from worker.tools.base import SiteTool

Factory = Callable[[Mapping[str, Any]], SiteTool]
"""Creates a tool from its options, which are plain data; it must not connect to anything."""

_factories: dict[str, Factory] = {}


def register(type_: str, factory: Factory) -> None:
    """Add a type of tool; ``worker/tools/TYPE.py`` needs none, its ``create`` is the factory."""
    _factories[type_] = factory


def create_tool(options: Mapping[str, Any]) -> SiteTool:
    """Return the tool with these options. Raise ModuleNotFoundError for an unknown type."""
    type_: str = options["type"]
    if type_ not in _factories:
        _factories[type_] = import_module(f"worker.tools.{type_}").create
    return _factories[type_](options)
