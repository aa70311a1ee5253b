"""Renders chat templates, as a limited process.

A template comes with a model's file and is untrusted: the sandbox lets it reach its variables only,
and too much time or memory ends this process. The functions beyond Jinja are those of Hugging
Face's ``apply_chat_template``.
"""

from __future__ import annotations

import contextlib
import json
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from inference_site.core.limited_process import serve
from worker.engines.chat.template import TOO_COMPLEX

_CPU_S = 2
"""Processor time for one prompt; a conversation of 10,000 messages takes a tenth of it."""
_STOP_TEXTS = "stop_strings"
_MEMORY = 512 * 2**20
_MOST_CHARACTERS = 16 * 2**20


def answer(source: str, variables: dict[str, Any] | None) -> tuple[str, str]:
    """Return the error, empty if there is none, and the prompt.

    Without variables only compile, and return the template's own stop texts as JSON.
    """
    try:
        template = _compiled(source)
        prompt = _stop_texts(source) if variables is None else template.render(variables)
    except (MemoryError, OverflowError, RecursionError):  # A huge range raises OverflowError.
        return TOO_COMPLEX, ""
    except Exception as exc:  # noqa: BLE001  # A template can raise whatever Python can.
        return str(exc) or type(exc).__name__, ""
    return (TOO_COMPLEX, "") if len(prompt) > _MOST_CHARACTERS else ("", prompt)


def _stop_texts(source: str) -> str:
    """Return the list that a template sets as ``stop_strings``, as TabbyAPI's templates do."""
    stop_texts: list[str] = []
    for node in _environment.parse(source).body:
        if isinstance(node, nodes.Assign) and node.target == nodes.Name(_STOP_TEXTS, "store"):
            with contextlib.suppress(nodes.Impossible):
                assert isinstance(node.node, nodes.Expr)
                value = node.node.as_const()
                texts = value if isinstance(value, list) else []
                stop_texts = [text for text in texts if isinstance(text, str) and text]
    return json.dumps(stop_texts)


class _GenerationBlock(Extension):
    """``{% generation %}``, which marks the assistant's text for training, without an effect."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as Hugging Face writes it: characters as they are, nothing escaped for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(str(message))


_environment = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
)
_environment.filters["tojson"] = _tojson
_environment.globals["raise_exception"] = _raise_exception
_environment.globals["strftime_now"] = lambda form: datetime.now(tz=UTC).astimezone().strftime(form)
_compiled = lru_cache(64)(_environment.from_string)


if __name__ == "__main__":
    serve(answer, _CPU_S, _MEMORY)
