"""The texts of mails: about alarms, calls that wait for an approval, and tests of endpoints.

A mail has nothing that does something when it is opened: its link leads to a page of the console,
which asks for a login first. The texts have line breaks where a model's or a tool's name has them,
so a subject is made one line.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Any

from django.conf import settings

from inference_site.outbox.models import APPROVAL_EVENT

_STATES = {"alarm.firing": "Firing", "alarm.resolved": "Resolved"}
_MAX_SUBJECT = 200


def mail_of(event_type: str, data: Mapping[str, Any]) -> tuple[str, str]:
    """Return the subject and the text of the mail about an event."""
    subject, lines = _approval(data) if event_type == APPROVAL_EVENT else _alarm(event_type, data)
    return _one_line(subject)[:_MAX_SUBJECT], "\n".join(lines)


def _alarm(event_type: str, data: Mapping[str, Any]) -> tuple[str, list[str]]:
    state, lines = _STATES.get(event_type, "Test"), [data["text"]]
    if data.get("started_at"):
        lines += ["", f"{state}; began at {_shown(data['started_at'])} UTC."]
    if data.get("resolved_at"):
        lines.append(f"Ended at {_shown(data['resolved_at'])} UTC.")
    return f"{state}: {data['text']}", lines


def _approval(data: Mapping[str, Any]) -> tuple[str, list[str]]:
    count = data["count"]
    calls = "1 call" if count == 1 else f"{count} calls"
    project = _one_line(data["project"])
    lines = [f"A response of the project {project} waits until these calls are approved:", ""]
    for question in data["approval_requests"]:
        lines.append(f"- {_one_line(question['server_label'])}: {_one_line(question['name'])}")
        if question.get("arguments"):
            lines.append(f"  {_one_line(question['arguments'])}")
    if (more := count - len(data["approval_requests"])) > 0:
        lines.append(f"- and {more} more")
    lines += ["", *_where(data), "", f"Response: {data['id']}"]
    return f"Approval needed: {calls} of MCP tools in {project}", lines


def _where(data: Mapping[str, Any]) -> list[str]:
    """Return where the questions are answered."""
    page = f"{settings.SITE_URL}{data['page']}"
    if not data["is_answered_in_console"]:
        return [
            "The answer must come through the API, because a server was named by its URL and its "
            "credentials are not stored. The calls:",
            page,
        ]
    if not settings.SITE_URL:
        return ["Approve or refuse them in the console of the site, on this page:", page]
    return ["Approve or refuse them here, after a login. Opening the page does nothing.", page]


def _one_line(text: str) -> str:
    """Return a text without what could end its line, or that a mail server does not take."""
    line = " ".join(text.split())
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line)


def _shown(moment: str) -> str:
    return f"{dt.datetime.fromisoformat(moment):%Y-%m-%d %H:%M:%S}"
