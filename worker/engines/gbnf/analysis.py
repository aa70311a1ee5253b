"""What parts of a grammar may begin with, go on with and be followed by.

llguidance's lexer takes the longest text that a terminal matches, where GBNF tries every length.
The two agree where what a part may go on with is nothing that may follow it.

Sets of characters are numbers: a bit for each character below 256, and one for all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from worker.engines.gbnf.parser import (
    Alternatives,
    Chars,
    Node,
    Reference,
    Repeat,
    Sequence,
    Text,
    Token,
)

_Known = TypeVar("_Known", bool, int)
_OTHERS = 256
_ALL = (1 << _OTHERS + 1) - 1


class Analysis:
    """The properties of the rules, by name. Raise ValueError for a rule that is missing."""

    def __init__(self, rules: dict[str, Node]) -> None:
        self._rules = rules
        self._is_empty = dict.fromkeys(rules, False)
        self._first, self._further = dict.fromkeys(rules, 0), dict.fromkeys(rules, 0)
        self._is_lexical = dict.fromkeys(rules, False)
        self.follow = dict.fromkeys(rules, 0)
        """What may come after the rule, wherever it is used."""
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
                return _get(self._is_empty, name)
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
            case Chars():
                return _mask(node)
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
        """Return what nodes after each other, and then ``follow``, may begin with."""
        found = 0
        for node in nodes:
            found |= self.first(node)
            if not self.can_be_empty(node):
                return found
        return found | follow

    def further(self, node: Node) -> int:
        """Return the characters by which a match may become a longer one, and some others."""
        match node:
            case Reference(name):
                return self._further[name]
            case Repeat(inner, _):
                return self.further(inner) | self.first(inner)
            case Sequence(nodes):
                return self._further_of(nodes)
            case Alternatives(nodes):
                firsts = [self.first(inner) for inner in nodes]
                if sum(firsts) != _union(firsts):  # Two begin alike.
                    return _ALL
                grows = _union(firsts) if self.can_be_empty(node) else 0
                return grows | _union(map(self.further, nodes))
            case _:
                return 0

    def _further_of(self, nodes: tuple[Node, ...]) -> int:
        found = 0
        for node in reversed(nodes):
            found |= self.further(node)
            if not self.can_be_empty(node):
                break
            found |= self.first(node)
        return found

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
        """Return what may come after each turn of a repetition."""
        return follow if repeat.sign == "?" else follow | self.first(repeat.node)

    def followed(self, sequence: Sequence, follow: int) -> list[tuple[Node, int]]:
        """Return the nodes, each with what may come after it."""
        pairs: list[tuple[Node, int]] = []
        for node in reversed(sequence.nodes):
            pairs.append((node, follow))
            follow = self.first_of((node,), follow)
        return pairs[::-1]


def _get(known: dict[str, bool], name: str) -> bool:
    if name not in known:
        raise ValueError(f"there is no rule {name!r}")
    return known[name]


def _union(sets: Iterable[int]) -> int:
    found = 0
    for set_ in sets:
        found |= set_
    return found


def _bit(code: int) -> int:
    return 1 << min(code, _OTHERS)


def _mask(chars: Chars) -> int:
    mask = 0
    for low, high in chars.ranges:
        mask |= (_bit(max(low, high)) << 1) - _bit(low)
    # The others are many: to leave out some does not leave out all.
    return _ALL & ~mask | 1 << _OTHERS if chars.is_negated else mask
