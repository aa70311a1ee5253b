"""The environment that chat templates run in: sandboxed, bounded, with the names they expect.

A template comes with a model's file, from anywhere. It reaches nothing but its variables, and what
it can do is counted: turns of loops, calls, and the length of texts. What it expects beyond Jinja
is what Hugging Face's ``apply_chat_template`` gives it.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_CHARACTERS = 16 * 2**20
"""Of a rendered prompt, and of any text that is put together on the way."""
_MAX_STEPS = 1_000_000
"""Turns of loops and calls in one rendering; a conversation takes some ten a message."""
_MAX_NUMBER = 1_000_000
"""That a filter or a method may be given: a width, a count."""
_WIDE = re.compile(r"%[^%a-zA-Z]*(\d{5}|\*)")

_steps: ContextVar[list[int]] = ContextVar("steps")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja as Hugging Face sets it up, with bounds. Thread-safe."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
        )
        self.filters.update({name: _modest(filter_) for name, filter_ in self.filters.items()})
        self.filters["tojson"] = _modest(_tojson)
        self.filters["counted"] = _counted
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join the parts of a macro or a block."""
        parts = list(parts)
        _check_length(sum(map(len, parts)))
        return "".join(parts)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call what the template calls. Raise SecurityError past the bounds."""
        _spend(1 + (len(args[0]) if args and isinstance(obj, LoopContext) else 0))
        _check_numbers((*args, *kwargs.values()))
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute what can be larger than its operands only within bounds."""
        match operator, left, right:
            case "+", (str() | list() | tuple()), (str() | list() | tuple()):
                _check_length(len(left) + len(right))
            case "*", (str() | list() | tuple()), int():
                _check_length(len(left) * right)
            case "*", int(), (str() | list() | tuple()):
                _check_length(left * len(right))
            case "*", int(), int():
                _check_length(left.bit_length() + right.bit_length())
            case "**", _, _:
                _check_numbers((left, right))
                _check_length(abs(int(right)) * 20)
            case "%", str(), _ if _WIDE.search(left):
                raise SecurityError("a width is too large")
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Bounding(self).visit(tree)
        return tree


def render_bounded(environment: BoundedEnvironment, template: Any, **variables: Any) -> str:
    """Render the template. Raise SecurityError past the bounds, else what the template raises."""
    token = _steps.set([_MAX_STEPS])
    try:
        pieces, length = [], 0
        for piece in template.generate(**variables):
            length += len(piece)
            _check_length(length)
            pieces.append(piece)
        return "".join(pieces)
    finally:
        _steps.reset(token)


class _Bounding(NodeTransformer):
    """Has loops count their turns, and ``~`` check lengths as ``+`` does."""

    def __init__(self, environment: BoundedEnvironment) -> None:
        self._environment = environment

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = self._filter(node.iter, "counted")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        joined, *rest = (self._filter(part, "string") for part in node.nodes)
        for text in rest:
            joined = nodes.Add(joined, text, lineno=node.lineno)
            joined.set_environment(self._environment)
        return joined

    def _filter(self, node: nodes.Node, name: str) -> nodes.Expr:
        filtered: nodes.Expr = nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
        filtered.set_environment(self._environment)
        return filtered


class _GenerationBlock(Extension):
    """``{% generation %}``, which marks the assistant's words for training: it changes nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _spend(steps: int) -> None:
    left = _steps.get(None)
    if left is None:  # Jinja computes constants when it compiles.
        return
    left[0] -= steps
    if left[0] < 0:
        raise SecurityError("the template takes too many steps")


def _check_length(length: int) -> None:
    if length > MAX_CHARACTERS:
        raise SecurityError("the prompt is too long")


def _check_numbers(values: Iterable[Any]) -> None:
    if any(isinstance(value, int | float) and abs(value) > _MAX_NUMBER for value in values):
        raise SecurityError("a number is too large")


def _counted(iterable: Any) -> list[Any]:
    items = list(iterable)
    _spend(len(items))
    return items


def _modest(filter_: Callable[..., Any]) -> Callable[..., Any]:
    """Return the filter with its numbers checked; the value it filters may be any."""
    own = 2 if hasattr(filter_, "jinja_pass_arg") else 1

    @functools.wraps(filter_)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_numbers((*args[own:], *kwargs.values()))
        return filter_(*args, **kwargs)

    return checked


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


def _strftime_now(format_: str) -> str:
    return datetime.now(tz=UTC).astimezone().strftime(format_)
