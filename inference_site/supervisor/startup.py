"""Migrates a site's database and, on the first run, creates a project, a key and an admin."""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path

from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.db import connections

from inference_site import environment
from inference_site.accounts.keys import create_key
from inference_site.accounts.models import ApiKey, Project, Scope
from inference_site.supervisor.stack import Stack, write_private

_FIRST_SCOPES = [Scope.INFERENCE, Scope.USAGE, Scope.DEBUG]
"""It goes into apps, so it must not take models from the others: no ``models:write``."""

_CONNECT_S = 30
"""A request is refused sooner; a site does not give up its start because its host is busy."""


@dataclass(frozen=True, slots=True)
class FirstSecrets:
    """The secrets that this run created, if any; they are shown once."""

    admin_password: str | None
    api_key: str | None


def prepare_site(database_url: str, data_dir: Path) -> FirstSecrets:
    """Migrate the database at this address, and create what the first run needs.

    Safe to repeat: existing objects are not changed.
    """
    # The settings were read before the database had an address; nothing has connected yet.
    default = connections.settings["default"]
    found = environment.database(database_url)
    default.update(found, OPTIONS={**default["OPTIONS"], **found.get("OPTIONS", {})})
    default["OPTIONS"].pop("pool")  # A single connection is enough here.
    default["OPTIONS"]["connect_timeout"] = _CONNECT_S
    try:
        call_command("migrate", verbosity=0, interactive=False)
        return FirstSecrets(_first_admin(), _first_key(data_dir))
    finally:
        connections.close_all()


def _first_admin() -> str | None:
    """Create the user ``admin`` if there are no users; return its password."""
    users = get_user_model()
    if users.objects.exists():
        return None
    password = secrets.token_urlsafe(12)
    users.objects.create_superuser(username="admin", email="", password=password)
    return password


def _first_key(data_dir: Path) -> str | None:
    """Create a key if there are none; write it to ``DATA_DIR/api_key`` and return it."""
    if ApiKey.objects.exists():
        return None
    project, _created = Project.objects.get_or_create(name="default")
    _record, secret = create_key(project, "first key", scopes=_FIRST_SCOPES)
    write_private(data_dir / "api_key", secret)
    return secret


# The module's text:
# """Waiting until the site that ``manage.py serve`` starts is ready, and saying why it is not."""


_MODEL = re.compile(r"([^,(]+?)(?: \(([^)]*)\))?(?:, |$)")
_SAY_AGAIN_S = 5.0
_PERIOD_S = 0.25
"""Each look is a request with a connection to PostgreSQL of its own."""


def wait_until_ready(url: str, stack: Stack, say: Callable[[str], None]) -> list[str]:
    """Return when the site can answer; return the models that could not be loaded.

    Say what is waited for. Raise ServiceError when the web process or the worker cannot start.
    """
    said, say_at = "", time.monotonic() + _SAY_AGAIN_S
    while True:
        fault = _fault(url)
        waiting = _waiting(fault)
        if fault is not None and not waiting:
            return sorted(_models(fault))
        stack.supervisor.restart_dead()
        stack.require_started()
        if waiting and waiting != said and time.monotonic() > say_at:
            said, say_at = waiting, time.monotonic() + _SAY_AGAIN_S
            say(f"waiting for {waiting}")
        time.sleep(_PERIOD_S)


def _fault(url: str) -> dict[str, str] | None:
    """Return the checks that fail, with what they say; None while nothing answers."""
    try:
        with urllib.request.urlopen(f"{url}/health/ready", timeout=5) as answer:  # noqa: S310  # Our own address.
            models: dict[str, str] = json.loads(answer.read())["models"]
        # A worker of an earlier ``serve`` may have said so.
        coming = [f"{name} (loading)" for name, state in models.items() if state == "restarting"]
        return {"workers": f"no live worker for: {', '.join(coming)}"} if coming else {}
    except urllib.error.HTTPError as exc:
        checks: dict[str, str] = json.loads(exc.read()).get("checks", {"web": "busy"})
        return {name: text for name, text in checks.items() if text != "ok"}
    except (OSError, HTTPException):
        return None


def _waiting(fault: dict[str, str] | None) -> str:
    """Return what may still become ready, in words; models that have failed will not."""
    if fault is None:
        return "the web process"
    parts = [name for name in fault if name != "workers"]
    loading = [f"{model} ({state})" for model, state in _models(fault).items() if state != "failed"]
    return ", ".join([*parts, *loading])


def _models(fault: dict[str, str]) -> dict[str, str]:
    """Return the models that no worker serves, with their states."""
    _, _, named = fault.get("workers", "").partition(": ")
    return {found[1]: found[2] or "starting" for found in _MODEL.finditer(named)}


# The module's text:
# """What ``manage.py serve`` says when the site is ready: addresses, secrets, a first request."""


_BOLD, _GREEN, _PLAIN = "\033[1m", "\033[32m", "\033[0m"
_CHAT = '{"model": "%s", "stream": true, "messages": [{"role": "user", "content": "%s"}]}'
_EMBED = '{"model": "%s", "input": "Hello"}'


@dataclass(frozen=True, slots=True)
class Welcome:
    """``models`` are served; ``first`` is the one of the example, if there is one.

    ``made`` are secrets of a first run, which are shown once.
    """

    url: str
    data_dir: Path
    made: FirstSecrets
    models: list[str]
    first: str = ""
    first_chats: bool = True
    question: str = "Tell me a story."

    def asking(self, model: str, question: str) -> Welcome:
        """Return the same with another first request: this question, to a model that chats."""
        return replace(self, first=model, first_chats=True, question=question)

    def show_request(self) -> None:
        """Print the first request."""
        print(self._request(), flush=True)

    def show(self) -> None:
        """Print the addresses, in colour on a terminal."""
        rows = [
            ("Console", f"{self.url}/admin/", _user(self.made)),
            ("Playground", f"{self.url}/playground", ""),
            ("API", f"{self.url}/v1", self._key()),
            ("Docs", f"{self.url}/docs", "the endpoints of /v1; README.md and docs/ for the rest"),
            ("Models", ", ".join(self.models) or "none", ""),
            ("Logs", str(self.data_dir / "log"), ""),
        ]
        lines = [f"  {_style(_BOLD, f'{what:<10}')} {where}" for what, where, _ in rows]
        width = max(len(where) for what, where, more in rows if more)
        for at, (what, where, more) in enumerate(rows):
            if more:
                lines[at] = f"  {_style(_BOLD, f'{what:<10}')} {where:<{width}}   {more}"
        print("\n" + "\n".join(lines) + "\n", flush=True)

    def _key(self) -> str:
        key = shlex.quote(str(self.data_dir / "api_key"))
        return f"key: {self.made.api_key}   (kept in {key})" if self.made.api_key else f"key: {key}"

    def _request(self) -> str:
        if not self.first:
            return ""
        key = shlex.quote(str(self.data_dir / "api_key"))
        path = "chat/completions" if self.first_chats else "embeddings"
        body = _CHAT % (self.first, self.question) if self.first_chats else _EMBED % self.first
        return (
            f"  {_style(_GREEN, 'curl')} {self.url}/v1/{path} \\\n"
            f'    -H "Authorization: Bearer $(cat {key})" \\\n'
            '    -H "Content-Type: application/json" \\\n'
            f"    -d '{body}'\n"
        )


def show_secrets(made: FirstSecrets) -> None:
    """Print the secrets of a first run whose start has failed later: they are shown only once."""
    if made.admin_password:
        print(f"\n  Console    {_user(made)}", flush=True)


def _user(made: FirstSecrets) -> str:
    if not made.admin_password:
        return "user: admin"
    return f"user: admin   password: {made.admin_password}   (shown once)"


def _style(code: str, text: str) -> str:
    is_plain = not sys.stdout.isatty() or "NO_COLOR" in os.environ
    return text if is_plain else f"{code}{text}{_PLAIN}"
