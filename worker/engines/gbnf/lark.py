"""From the rules of GBNF to a Lark grammar of the same texts."""

from __future__ import annotations

import json

from worker.engines.gbnf.analysis import Analysis
from worker.engines.gbnf.parser import (
    Alternatives,
    Chars,
    Node,
    Reference,
    Repeat,
    Sequence,
    Text,
    Token,
    parse,
)


def lark_of_gbnf(source: str) -> str:
    """Return a Lark grammar of what the GBNF matches. Raise ValueError for what is no GBNF."""
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
        """Return what a rule says of the node, which is followed by these characters."""
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
        """Return what a terminal says of the node."""
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
