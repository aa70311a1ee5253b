"""Calls of tools that the site runs, and their results, between the worker and the assemblers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Source:
    """A place that a result quotes, for annotations: a web page, or a file with its id and name."""

    url: str
    title: str
    is_file: bool = False


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a call returned.

    ``output`` is the text for the model. ``fields`` are fields of the call's output item that are
    known only now (``action``, ``results``, ``output``, ``error`` …), in the form of the API; their
    values are JSON.
    """

    output: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    sources: Sequence[Source] = ()
    is_error: bool = False


@dataclass(frozen=True, slots=True)
class SiteCall:
    """A call that the site must run before the answer can continue.

    ``number`` counts the site-run calls of one generation from 0; an attempt after a restart gives
    the same call the same number. ``tool`` is the position of the tool in ``Assembly.site_tools``.
    ``name`` is the name of the function as the tool knows it. ``arguments`` is JSON text, as the
    model wrote it.
    """

    number: int
    tool: int
    name: str
    arguments: str
