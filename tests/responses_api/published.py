"""The golden streams against the published documents: ``python -m tests.responses_api.published``.

Takes OpenAI's document, or that of Open Responses, or both, as JSON files, and prints what in
``golden/`` contradicts them, but for what is decided: ``DECIDED`` says what and why. The documents
are not part of the project, so this is no part of the suite.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema_rs

GOLDEN = Path(__file__).parent / "golden"


class Violation(NamedTuple):
    """A contradiction: the event's type, the place in it, and the validator's words."""

    event: str
    path: str
    message: str


class Decision(NamedTuple):
    """Contradictions that stay: part of the document's title, part of the violation, the reason."""

    document: str
    part: str
    why: str


DECIDED = (
    Decision("OpenAI", "response/usage: null", "OpenAI's own streams have null until the end"),
    Decision("Open Responses", "reasoning_text", "OpenAI's name of the event; clients know it"),
    *(
        Decision("Open Responses", f'"type":"{type_}"', "a tool or item that only OpenAI has")
        for type_ in (
            *("custom", "shell", "local_shell", "apply_patch", "namespace", "tool_search"),
            *("shell_call", "local_shell_call", "apply_patch_call", "custom_tool_call"),
            *("tool_search_call", "compaction"),
        )
    ),
    Decision("Open Responses", "custom_tool_call", "events of a tool that only OpenAI has"),
    Decision("Open Responses", "shell_call_command", "events of a tool that only OpenAI has"),
)


def violations(document: dict[str, Any]) -> Iterator[Violation]:
    """Yield what the golden streams contradict of a document."""
    components = _without_discriminators(document["components"])
    names = _event_schemas(components["schemas"])
    validators: dict[str, Any] = {}
    for event in _events():
        name = names.get(event["type"])
        if name is None:
            yield Violation(event["type"], "", "the document has no such event")
            continue
        if name not in validators:
            schema = {"$ref": f"#/components/schemas/{name}", "components": components}
            validators[name] = jsonschema_rs.Draft202012Validator(schema)
        for error in validators[name].iter_errors(event):
            path = "/".join(map(str, error.instance_path))
            yield Violation(event["type"], path, error.message)


def _without_discriminators(value: Any) -> Any:
    """Return a schema without OpenAPI's ``discriminator``, which JSON Schema does not know."""
    if isinstance(value, dict):
        return {k: _without_discriminators(v) for k, v in value.items() if k != "discriminator"}
    return [_without_discriminators(one) for one in value] if isinstance(value, list) else value


def _event_schemas(schemas: dict[str, Any]) -> dict[str, str]:
    """Return the names of the schemas of events, by the events' types."""
    found: dict[str, str] = {}
    for name, schema in schemas.items():
        is_own = "Event" in name and not name.startswith(("Beta", "WebSocket"))
        type_ = schema.get("properties", {}).get("type", {}) if is_own else {}
        for value in type_.get("enum", [type_.get("const")]):
            if value == "error" or str(value).startswith("response."):
                found.setdefault(value, name)
    return found


def _events() -> Iterator[dict[str, Any]]:
    for file in sorted(GOLDEN.glob("*.sse")):
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def decision_of(title: str, violation: Violation) -> Decision | None:
    """Return the decision by which a violation stays."""
    text = f"{violation.event} {violation.path}: {violation.message}"
    return next((one for one in DECIDED if one.document in title and one.part in text), None)


def main() -> None:
    """Print what contradicts the documents; exit with 1 if that is anything undecided."""
    parser = argparse.ArgumentParser("tests.responses_api.published", description=__doc__)
    parser.add_argument("documents", nargs="+", type=Path)
    status = 0
    for path in parser.parse_args().documents:
        document = json.loads(path.read_text(encoding="utf-8"))
        title = document["info"]["title"]
        decided: Counter[str] = Counter()
        others: Counter[Violation] = Counter()
        for violation in violations(document):
            decision = decision_of(title, violation)
            if decision is None:
                others[violation] += 1
            else:
                decided[decision.why] += 1
        print(f"{title}: {others.total()} violations, {decided.total()} decided")
        for why, count in decided.items():
            print(f"  decided: {count} x {why}")
        for (event, place, message), count in others.items():
            print(f"  {count} x {event} {place}: {message[:200]}")
        status |= bool(others)
    sys.exit(status)


if __name__ == "__main__":
    main()
