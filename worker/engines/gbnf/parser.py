"""Reads GBNF: from its text to the nodes of its rules.

Source: ``grammars/README.md`` and ``src/llama-grammar.cpp`` of llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""(?P<space>[ \t]+|\#[^\r\n]*)
    |(?P<newline>[\r\n])
    |(?P<head>[A-Za-z0-9_-]+)[ \t]*::=
    |(?P<name>[A-Za-z0-9_-]+)
    |"(?P<text>(?:[^"\\]|\\.)*)"
    |\[(?P<chars>\^?(?:[^\]\\]|\\.)+)\]
    |(?P<repeat>[*+?]|\{\s*[0-9]+\s*(?:,\s*[0-9]*\s*)?\})
    |(?P<sign>[|().])
    |(?P<token><[^<>\s]+>)""",
    re.VERBOSE | re.DOTALL,
)
_CHARACTER = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([]tnr\\\"[]))|([^\\])", re.DOTALL
)
_ESCAPED = {"t": "\t", "n": "\n", "r": "\r"}


@dataclass(frozen=True, slots=True)
class Text:
    """A literal."""

    value: str


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of these ranges, or of all others."""

    ranges: tuple[tuple[int, int], ...]
    is_negated: bool


@dataclass(frozen=True, slots=True)
class Token:
    """A token of the model's vocabulary, as it is written: ``<name>`` or ``<[id]>``."""

    text: str


@dataclass(frozen=True, slots=True)
class Reference:
    """What another rule matches."""

    name: str


@dataclass(frozen=True, slots=True)
class Repeat:
    """A node, as often as ``sign`` says: ``*``, ``+``, ``?`` or ``{m,n}``."""

    node: Node
    sign: str


@dataclass(frozen=True, slots=True)
class Sequence:
    """Nodes after each other."""

    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alternatives:
    """One of these nodes."""

    nodes: tuple[Node, ...]


Node = Text | Chars | Token | Reference | Repeat | Sequence | Alternatives


class _Body:
    """What comes after the ``::=`` of a rule. ``levels`` are the groups that are open."""

    def __init__(self, line: int) -> None:
        self.line = line
        self.levels: list[list[list[Node]]] = [[[]]]
        self.goes_on = True

    def add(self, kind: str, value: str) -> None:
        """Add a token of the grammar. Raise ValueError where it cannot be."""
        sequence = self.levels[-1][-1]
        self.goes_on = (kind, value) == ("sign", "|")
        match kind, value:
            case "sign", "|":
                self.levels[-1].append([])
            case "sign", "(":
                self.levels.append([[]])
            case "sign", ")" if len(self.levels) > 1:
                group = self._close()
                self.levels[-1][-1].append(group)
            case "repeat", _ if sequence:
                sequence[-1] = Repeat(sequence[-1], "".join(value.split()))
            case ("repeat", _) | ("sign", ")"):
                raise ValueError(f"{value!r} follows nothing")
            case _:
                sequence.append(_leaf(kind, value))

    def node(self) -> Node:
        """Return all of it. Raise ValueError while a group is open."""
        if len(self.levels) > 1:
            raise ValueError(f"line {self.line}: a group is not closed")
        return self._close()

    def _close(self) -> Node:
        sequences = [Sequence(tuple(nodes)) for nodes in self.levels.pop()]
        return sequences[0] if len(sequences) == 1 else Alternatives(tuple(sequences))


def parse(source: str) -> dict[str, Node]:
    """Return the rules by name. Raise ValueError for what is no GBNF."""
    bodies: dict[str, _Body] = {}
    body: _Body | None = None
    for kind, value, line in _tokens(source):
        with _at_line(line):
            if kind == "head":
                body = bodies[value] = _Body(line)
            elif kind == "newline":
                # A rule goes on after "::=", after "|" and in a group.
                body = body if body and (body.goes_on or len(body.levels) > 1) else None
            elif body is None:
                raise ValueError(f"{value!r} belongs to no rule")
            else:
                body.add(kind, value)
    if "root" not in bodies:
        raise ValueError("there is no rule 'root'")
    return {name: body.node() for name, body in bodies.items()}


@contextmanager
def _at_line(line: int) -> Iterator[None]:
    """Have errors say in which line of the grammar they are."""
    try:
        yield
    except ValueError as exc:
        raise ValueError(f"line {line}: {exc}") from exc


def _tokens(source: str) -> Iterator[tuple[str, str, int]]:
    """Yield each token's kind and value, and the line in which it begins."""
    position, line = 0, 1
    while position < len(source):
        match = _TOKEN.match(source, position)
        if match is None:
            raise ValueError(f"line {line}: cannot read {source[position : position + 20]!r}")
        kind = str(match.lastgroup)
        if kind != "space":
            yield kind, match[kind], line
        line += match[0].count("\n")
        position = match.end()


def _leaf(kind: str, value: str) -> Node:
    match kind:
        case "text":
            return Text("".join(character for character, _ in _characters(value)))
        case "chars":
            return _chars(value)
        case "sign":  # A dot.
            return Chars((), is_negated=True)
        case "name":
            return Reference(value)
        case _:
            return Token(value)


def _chars(source: str) -> Chars:
    inner = source.removeprefix("^")
    characters = list(_characters(inner))
    ranges, place = [], 0
    while place < len(characters):
        is_range = place + 2 < len(characters) and characters[place + 1][1] == "-"
        end = place + 2 if is_range else place
        ranges.append((ord(characters[place][0]), ord(characters[end][0])))
        place = end + 1
    return Chars(tuple(ranges), is_negated=inner != source)


def _characters(source: str) -> Iterator[tuple[str, str]]:
    """Decode a literal or a class: each character, and how it is written."""
    position = 0
    while position < len(source):
        match = _CHARACTER.match(source, position)
        if match is None:
            raise ValueError(f"unknown escape at {source[position : position + 10]!r}")
        position = match.end()
        *digits, sign, plain = match.groups()
        if code := next(filter(None, digits), None):
            if 0xD800 <= int(code, 16) < 0xE000 or int(code, 16) > 0x10FFFF:
                raise ValueError(f"{match[0]!r} is no character")
            yield chr(int(code, 16)), match[0]
        else:
            yield plain or _ESCAPED.get(sign, sign), match[0]
