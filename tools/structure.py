"""``python -m tools.structure``: what the packages import from one another, and their size.

The picture is a Mermaid graph. An arrow means that a module of one package imports a module of the
other, or that a model has a foreign key to the other's. ``--root`` names another checkout.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median, quantiles

APPLICATION = ("inference_site", "completions", "responses_api", "worker")
PROJECT = "inference_site"
_SKIPPED = {"migrations", "recipe"}
_RELATIONS = {"ForeignKey", "OneToOneField", "ManyToManyField"}

Graph = dict[str, set[str]]


@dataclass(frozen=True)
class Module:
    """A module of the application."""

    name: str
    path: Path

    @property
    def folder(self) -> str:
        """The package that holds the module; a package's ``__init__`` is in the package."""
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]

    @cached_property
    def source(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @property
    def lines(self) -> int:
        return len(self.source.splitlines())

    def functions(self) -> Iterator[int]:
        """Yield the length of each function and method in lines, decorators apart."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield (node.end_lineno or node.lineno) - node.lineno + 1

    def imports(self) -> Iterator[str]:
        """Yield the dotted names that the module imports, in functions too."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)

    def related_apps(self) -> Iterator[str]:
        """Yield the labels of the apps that foreign keys name in text, as ``app.Model``."""
        for node in ast.walk(self.tree):
            if not (isinstance(node, ast.Call) and node.args):
                continue
            name, to = getattr(node.func, "attr", ""), node.args[0]
            if name in _RELATIONS and isinstance(to, ast.Constant) and "." in str(to.value):
                yield str(to.value).partition(".")[0]


def modules(root: Path) -> dict[str, Module]:
    """Return the modules of the application by name, without migrations."""
    found = {}
    for top in APPLICATION:
        for path in sorted((root / top).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            if not _SKIPPED & set(parts):
                name = ".".join(parts).removesuffix(".__init__")
                found[name] = Module(name, path)
    return found


def apps(found: dict[str, Module]) -> list[str]:
    """Return the packages that are Django apps."""
    return sorted(name.removesuffix(".apps") for name in found if name.endswith(".apps"))


def feature_apps(found: dict[str, Module]) -> list[str]:
    """Return the apps without the project's own, whose settings and addresses name them all."""
    return [app for app in apps(found) if app != PROJECT]


def graph(found: dict[str, Module], nodes: list[str]) -> Graph:
    """Return which of the packages ``nodes`` use which: by imports and by foreign keys.

    A module counts for the innermost node that holds it.
    """
    labels = {app.rpartition(".")[2]: app for app in apps(found)}
    edges: Graph = {node: set() for node in nodes}
    for module in found.values():
        source = _node_of(module.name, nodes)
        used = [*module.imports(), *(labels.get(app, "") for app in module.related_apps())]
        targets = {_node_of(name, nodes) for name in used} - {source, ""}
        if source:
            edges[source] |= targets
    return edges


def _node_of(name: str, nodes: list[str]) -> str:
    holders = [node for node in nodes if name == node or name.startswith(f"{node}.")]
    return max(holders, key=len, default="")


def packages(found: dict[str, Module]) -> list[str]:
    """Return the packages that the picture shows: two levels of folders."""
    folders = {".".join(module.folder.split(".")[:2]) for module in found.values()}
    return sorted(folders)


def cycle(edges: Graph) -> list[str]:
    """Return one cycle, which ends with its first package; an empty list if there is none."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node not in done:
            for target in sorted(edges[node]):
                if found := visit(target, [*path, node]):
                    return found
            done.add(node)
        return []

    return next(filter(None, (visit(node, []) for node in sorted(edges))), [])


def modules_by_folder(found: dict[str, Module]) -> Counter[str]:
    """Return how many modules each folder holds, ``__init__.py`` apart."""
    return Counter(m.folder for m in found.values() if m.path.name != "__init__.py")


def picture(edges: Graph) -> str:
    """Return the graph as Mermaid; packages that import each other are joined in red."""
    lines = ["graph TD"]
    number = 0
    for source, targets in sorted(edges.items()):
        for target in sorted(targets):
            lines.append(f"  {source} --> {target}")
            if source in edges[target]:
                lines.append(f"  linkStyle {number} stroke:red")
            number += 1
    return "\n".join(lines)


def spread(name: str, lengths: list[int]) -> str:
    """Return a line of median, 90th percentile and longest."""
    p90 = quantiles(lengths, n=10)[-1]
    return f"| {name} | {len(lengths):,} | {median(lengths):.0f} | {p90:.0f} | {max(lengths):,} |"


def figures(found: dict[str, Module]) -> str:
    """Return tables: lengths of files and functions, and modules and lines of each package."""
    files = [module for module in found.values() if module.lines]
    folders, lines, most = modules_by_folder(found), Counter[str](), defaultdict(list)
    for module in found.values():
        package = ".".join(module.folder.split(".")[:2])
        lines[package] += module.lines
    for folder, count in folders.items():
        most[".".join(folder.split(".")[:2])].append(count)
    rows = [
        "| lines of | how many | median | p90 | longest |",
        "|---|---|---|---|---|",
        spread("a file", [module.lines for module in files]),
        spread("a function", [n for module in files for n in module.functions()]),
        "",
        "| package | lines | modules | most modules in one folder |",
        "|---|---|---|---|",
        *(
            f"| {package} | {n:,} | {sum(most[package])} | {max(most[package], default=0)} |"
            for package, n in sorted(lines.items())
        ),
        f"| together | {sum(lines.values()):,} | {folders.total()} | {max(folders.values())} |",
    ]
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    found = modules(parser.parse_args().root)
    edges = graph(found, packages(found))
    pairs = sum(source in edges[target] for source in edges for target in edges[source]) // 2
    print(f"```mermaid\n{picture(edges)}\n```\n")
    print(f"{sum(map(len, edges.values()))} arrows, {pairs} pairs of packages need one another.")
    around = " → ".join(cycle(graph(found, feature_apps(found))))
    print(f"A cycle of Django apps: {around or 'none'}.\n")
    print(figures(found))


if __name__ == "__main__":
    main()
