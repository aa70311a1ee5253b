"""GBNF, llama.cpp's format of grammars, and its translation to llguidance's Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

_TOKEN = re.compile(
    r"""(?P<space>[ \t]+|\#[^\r\n]*)
    |(?P<newline>[\r\n])
    |(?P<head>[A-Za-z0-9_-]+)[ \t]*::=
    |(?P<name>[A-Za-z0-9_-]+)
    |"(?P<text>(?:[^"\\]|\\.)*)"
    |\[(?P<chars>\^?(?:[^\]\\]|\\.)+)\]
    |(?P<repeat>[*+?]|\{\s*[0-9]+\s*(?:,\s*(?:[0-9]+\s*)?)?\})
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
    """A reference to another rule."""

    name: str


@dataclass(frozen=True, slots=True)
class Repeat:
    """A node, repeated by ``sign``: ``*``, ``+``, ``?`` or ``{m,n}``."""

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
    """The right-hand side of a rule, after ``::=``. ``levels`` are the groups that are open."""

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
    """Return the rules by name. Raise ValueError for invalid GBNF."""
    bodies: dict[str, _Body] = {}
    body: _Body | None = None
    named_in: dict[str, int] = {}
    for kind, value, line in _tokens(source):
        try:
            if kind == "head":
                body = bodies[value] = _Body(line)
            elif kind == "newline":
                # A rule goes on after "::=", after "|" and in a group.
                body = body if body and (body.goes_on or len(body.levels) > 1) else None
            elif body is None:
                raise ValueError(f"{value!r} belongs to no rule")
            else:
                body.add(kind, value)
                if kind == "name":
                    named_in.setdefault(value, line)
        except ValueError as exc:
            raise ValueError(f"line {line}: {exc}") from exc
    if "root" not in bodies:
        raise ValueError("there is no rule 'root'")
    for name, line in named_in.items():
        if name not in bodies:
            raise ValueError(f"line {line}: there is no rule {name!r}")
    return {name: body.node() for name, body in bodies.items()}


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
            inner = value.removeprefix("^")
            characters = list(_characters(inner))
            ranges, place = [], 0
            while place < len(characters):
                is_range = place + 2 < len(characters) and characters[place + 1][1] == "-"
                end = place + 2 if is_range else place
                ranges.append((ord(characters[place][0]), ord(characters[end][0])))
                place = end + 1
            return Chars(tuple(ranges), is_negated=inner != value)
        case "sign":  # A dot.
            return Chars((), is_negated=True)
        case "name":
            return Reference(value)
        case _:
            return Token(value)


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


_Known = TypeVar("_Known", bool, int)
_OTHERS = 256
"""A set of characters is an integer: bit n stands for the character with the code n, and this bit
for all characters from 256 on."""
_ALL = (1 << _OTHERS + 1) - 1


class Analysis:
    """The properties of nodes and rules that a translation needs, such as how they may begin."""

    def __init__(self, rules: dict[str, Node]) -> None:
        self._rules = rules
        self._is_empty = dict.fromkeys(rules, False)
        self._first, self._further = dict.fromkeys(rules, 0), dict.fromkeys(rules, 0)
        self._is_lexical = dict.fromkeys(rules, False)
        self.follow = dict.fromkeys(rules, 0)
        """The characters that may follow a match of the rule, at any place that uses it."""
        self._settle(self._is_empty, self.can_be_empty)
        self._settle(self._first, self.first)
        self._settle(self._further, self.further)
        self._settle(self._is_lexical, self.is_lexical)
        before: dict[str, int] = {}
        while before != self.follow:
            before = dict(self.follow)
            for name, node in rules.items():
                self._pass_down(node, self.follow[name])

    def _settle(self, known: dict[str, _Known], of: Callable[[Node], _Known]) -> None:
        """Compute a property of all rules, again until no value changes: rules may be recursive."""
        before: dict[str, _Known] = {}
        while before != known:
            before = dict(known)
            for name, node in reversed(self._rules.items()):  # Rules mostly name later ones.
                known[name] = of(node)

    def can_be_empty(self, node: Node) -> bool:
        """Whether the node matches an empty text."""
        match node:
            case Text(value):
                return not value
            case Reference(name):
                return self._is_empty[name]
            case Repeat(inner, sign):
                return sign[0] in "*?" or sign.startswith("{0") or self.can_be_empty(inner)
            case Sequence(nodes):
                return all(map(self.can_be_empty, nodes))
            case Alternatives(nodes):
                return any(map(self.can_be_empty, nodes))
            case _:
                return False

    def first(self, node: Node) -> int:
        """Return the characters that a match may begin with."""
        match node:
            case Text(value):
                return _bit(ord(value[0])) if value else 0
            case Chars(ranges, is_negated):
                mask = 0
                for low, high in ranges:
                    mask |= (_bit(max(low, high)) << 1) - _bit(low)
                # The bit of the others stays: a range leaves out some of them, not all.
                return _ALL & ~mask | 1 << _OTHERS if is_negated else mask
            case Reference(name):
                return self._first[name]
            case Repeat(inner, _):
                return self.first(inner)
            case Sequence(nodes):
                return self.first_of(nodes, 0)
            case Alternatives(nodes):
                return _union(map(self.first, nodes))
            case Token():
                return 0

    def first_of(self, nodes: Iterable[Node], follow: int) -> int:
        """Return the characters that this sequence of nodes, before ``follow``, may begin with."""
        found = 0
        for node in nodes:
            found |= self.first(node)
            if not self.can_be_empty(node):
                return found
        return found | follow

    def further(self, node: Node) -> int:
        """Return characters by which a match may become a longer one: all of these, maybe more."""
        match node:
            case Reference(name):
                return self._further[name]
            case Repeat(inner, _):
                return self.further(inner) | self.first(inner)
            case Sequence(nodes):
                found = 0
                for last in reversed(nodes):
                    found |= self.further(last)
                    if not self.can_be_empty(last):
                        break
                    found |= self.first(last)
                return found
            case Alternatives(nodes):
                firsts = [self.first(inner) for inner in nodes]
                if sum(firsts) != _union(firsts):  # Two begin alike.
                    return _ALL
                grows = _union(firsts) if self.can_be_empty(node) else 0
                return grows | _union(map(self.further, nodes))
            case _:
                return 0

    def is_lexical(self, node: Node) -> bool:
        """Whether the node leads to no recursion and no token: it could be a regular expression."""
        match node:
            case Reference(name):
                return self._is_lexical[name]
            case Repeat(inner, _):
                return self.is_lexical(inner)
            case Sequence(nodes) | Alternatives(nodes):
                return all(map(self.is_lexical, nodes))
            case _:
                return not isinstance(node, Token)

    def _pass_down(self, node: Node, follow: int) -> None:
        """Add the characters that may follow this node to ``follow`` of the rules in it."""
        match node:
            case Reference(name):
                self.follow[name] |= follow
            case Repeat(inner, _):
                self._pass_down(inner, self.inside(node, follow))
            case Alternatives(nodes):
                for inner in nodes:
                    self._pass_down(inner, follow)
            case Sequence():
                for inner, after in self.followed(node, follow):
                    self._pass_down(inner, after)

    def inside(self, repeat: Repeat, follow: int) -> int:
        """Return the characters that may follow each turn of a repetition."""
        return follow if repeat.sign == "?" else follow | self.first(repeat.node)

    def followed(self, sequence: Sequence, follow: int) -> list[tuple[Node, int]]:
        """Return the nodes, each with what may come after it."""
        pairs: list[tuple[Node, int]] = []
        for node in reversed(sequence.nodes):
            pairs.append((node, follow))
            follow = self.first_of((node,), follow)
        return pairs[::-1]


def _union(sets: Iterable[int]) -> int:
    found = 0
    for set_ in sets:
        found |= set_
    return found


def _bit(code: int) -> int:
    return 1 << min(code, _OTHERS)


def lark_of_gbnf(source: str) -> str:
    """Return a Lark grammar of what the GBNF matches. Raise ValueError for invalid GBNF."""
    rules = parse(source)
    try:
        return _Writer(rules).write()
    except RecursionError as exc:
        raise ValueError("its groups are nested too deeply") from exc


class _Writer:
    """Writes a rule ``r1`` for each rule, and for one that can be a terminal a terminal ``R1``.

    What a rule repeats, such as the letters of a word, becomes a terminal ``T1`` where it can.
    """

    def __init__(self, rules: dict[str, Node]) -> None:
        self._rules, self._analysis = rules, Analysis(rules)
        self._numbers = {name: n for n, name in enumerate(rules)}
        self._terminals: list[str] = []

    def write(self) -> str:
        analysis, lines = self._analysis, []
        is_regular = analysis.is_lexical(self._rules["root"])
        root = f"{'R' if is_regular else 'r'}{self._numbers['root']}"
        for name, node in self._rules.items():
            if analysis.is_lexical(node):
                lines.append(f"R{self._numbers[name]}: {self._regular(node)}")
            if not is_regular:
                lines.append(f"r{self._numbers[name]}: {self._rule(node, analysis.follow[name])}")
        return "\n".join([f"start: {root}", *lines, *self._terminals])

    def _rule(self, node: Node, follow: int) -> str:
        """Return the node as Lark, in a rule; ``follow`` are the characters after it."""
        analysis = self._analysis
        is_exact = analysis.is_lexical(node) and not analysis.further(node) & follow
        match node:
            case Reference(name):
                return f"{'R' if is_exact else 'r'}{self._numbers[name]}"
            case Repeat() if is_exact:
                self._terminals.append(f"T{len(self._terminals)}: {self._regular(node)}")
                return f"T{len(self._terminals) - 1}"
            case Repeat(inner, sign):
                return f"({self._rule(inner, analysis.inside(node, follow))}){sign}"
            case Sequence():
                pairs = analysis.followed(node, follow)
                return " ".join(self._rule(inner, after) for inner, after in pairs)
            case Alternatives(nodes):
                return f"({' | '.join(self._rule(inner, follow) for inner in nodes)})"
            case _:
                return self._regular(node)

    def _regular(self, node: Node) -> str:
        """Return the node as Lark, in a terminal."""
        match node:
            case Text(value):
                return json.dumps(value, ensure_ascii=False)
            case Chars(ranges, is_negated):
                inside = "".join(rf"\u{{{low:x}}}-\u{{{high:x}}}" for low, high in ranges)
                return f"/[{'^' if is_negated else ''}{inside}]/" if ranges else "/(?s:.)/"
            case Token(text):
                return text
            case Reference(name):
                return f"R{self._numbers[name]}"
            case Repeat(inner, sign):
                return f"({self._regular(inner)}){sign}"
            case Sequence(nodes):
                return " ".join(map(self._regular, nodes))
            case Alternatives(nodes):
                return f"({' | '.join(map(self._regular, nodes))})"
