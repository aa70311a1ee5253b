"""The start of a site by ``manage.py serve``: prepare the database, wait, show the addresses.

On the first run a project, a key and an admin user are created.
"""

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
from itertools import chain, count
from pathlib import Path

from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.db import connections, transaction

from inference_site.accounts.keys import create_key
from inference_site.accounts.models import ApiKey, Project, Scope
from inference_site.core import environment
from inference_site.ops.serve.stack import Stack, write_private

_FIRST_SCOPES = [Scope.INFERENCE, Scope.USAGE, Scope.DEBUG]
"""Scopes for an application; not ``models:write``, which could unload the models of others."""
_CONNECT_S = 30
"""Longer than for a request, because a busy host must not end the start of a site."""
_MODEL = re.compile(r"([^,(]+?)(?: \(([^)]*)\))?(?:, |$)")
_REPORT_S = 5.0
_PERIOD_S = 0.25
"""Each check is a request with a new connection to PostgreSQL."""
_BOLD, _GREEN, _PLAIN = "\033[1m", "\033[32m", "\033[0m"
_CHAT = '{"model": "%s", "stream": true, "messages": [{"role": "user", "content": "%s"}]}'
_EMBED = '{"model": "%s", "input": "Hello"}'


@dataclass(frozen=True, slots=True)
class FirstSecrets:
    """The secrets that this run created, if any; they are shown once.

    ``admin_name`` is the first operator, also if an earlier run or somebody else created it.
    """

    admin_password: str | None
    api_key: str | None
    admin_name: str = "admin"


def prepare_site(database_url: str, data_dir: Path) -> FirstSecrets:
    """Migrate the database at this address; create an admin and a key if there are none.

    The user is ``admin``, or ``admin-2`` if somebody else has that name. The key is also written to
    ``DATA_DIR/api_key``.
    """
    # The settings were read before the database had an address; nothing has connected yet.
    default = connections.settings["default"]
    found = environment.database(database_url)
    default.update(found, OPTIONS={**default["OPTIONS"], **found.get("OPTIONS", {})})
    default["OPTIONS"].pop("pool")  # A single connection is enough here.
    default["OPTIONS"]["connect_timeout"] = _CONNECT_S
    try:
        call_command("migrate", verbosity=0, interactive=False)
        return create_first_secrets(data_dir)
    finally:
        connections.close_all()


@transaction.atomic
def create_first_secrets(data_dir: Path) -> FirstSecrets:
    """Create an admin and a key if there are none; all or nothing, because each is shown once.

    Raise OSError if the key cannot be written to ``DATA_DIR/api_key``.
    """
    admin_password = api_key = None
    users = get_user_model().objects
    staff = users.filter(is_staff=True).order_by("pk")  # The users of the audit log are not.
    if (first := staff.first()) is not None:
        admin_name = first.get_username()
    else:
        admin_name, admin_password = "admin", secrets.token_urlsafe(12)
        names = chain([admin_name], (f"{admin_name}-{number}" for number in count(2)))
        admin_name = next(name for name in names if not users.filter(username=name).exists())
        users.create_superuser(username=admin_name, email="", password=admin_password)
    if not ApiKey.objects.exists():
        project, _created = Project.objects.get_or_create(name="default")
        _record, api_key = create_key(project, "first key", scopes=_FIRST_SCOPES)
        write_private(data_dir / "api_key", api_key)
    return FirstSecrets(admin_password, api_key, admin_name)


def wait_until_ready(url: str, stack: Stack, say: Callable[[str], None]) -> list[str]:
    """Return when the site can answer; return the models that could not be loaded.

    Print what is not ready. Raise ServiceError when the web process or the worker cannot start.
    """
    said, say_at = "", time.monotonic() + _REPORT_S
    while True:
        failed = _failed_checks(url)
        if failed is None:
            waiting = "the web process"
        else:
            _, _, unserved = failed.get("workers", "").partition(": ")
            models = {found[1]: found[2] or "starting" for found in _MODEL.finditer(unserved)}
            loading = [f"{model} ({state})" for model, state in models.items() if state != "failed"]
            waiting = ", ".join([*(name for name in failed if name != "workers"), *loading])
            if not waiting:
                return sorted(models)
        stack.supervisor.restart_dead()
        stack.require_started()
        if waiting != said and time.monotonic() > say_at:
            said, say_at = waiting, time.monotonic() + _REPORT_S
            say(f"waiting for {waiting}")
        time.sleep(_PERIOD_S)


def _failed_checks(url: str) -> dict[str, str] | None:
    """Return the readiness checks that fail, with their texts; None while nothing answers."""
    try:
        with urllib.request.urlopen(f"{url}/health/ready", timeout=5) as answer:  # noqa: S310  # Our own address.
            models: dict[str, str] = json.loads(answer.read())["models"]
        # A worker of an earlier ``serve`` may have reported that it restarts.
        loading = [f"{name} (loading)" for name, state in models.items() if state == "restarting"]
        return {"workers": f"no live worker for: {', '.join(loading)}"} if loading else {}
    except urllib.error.HTTPError as exc:
        checks: dict[str, str] = json.loads(exc.read()).get("checks", {"web": "busy"})
        return {name: text for name, text in checks.items() if text != "ok"}
    except (OSError, HTTPException):
        return None


@dataclass(frozen=True, slots=True)
class Welcome:
    """The text that ``serve`` prints when it is ready: addresses, secrets, an example request.

    ``models`` are served. ``example_model`` is the model of the example request; without one, none
    is printed. ``secrets`` are those of a first run.
    """

    url: str
    data_dir: Path
    secrets: FirstSecrets
    models: list[str]
    example_model: str = ""
    example_chats: bool = True
    question: str = "Tell me a story."

    def with_question(self, model: str, question: str) -> Welcome:
        """Return the same with another example: this question to a model that chats."""
        return replace(self, example_model=model, example_chats=True, question=question)

    def show_request(self) -> None:
        """Print the example request."""
        if not self.example_model:
            print(flush=True)
            return
        key = shlex.quote(str(self.data_dir / "api_key"))
        if self.example_chats:
            path, body = "chat/completions", _CHAT % (self.example_model, self.question)
        else:
            path, body = "embeddings", _EMBED % self.example_model
        print(
            f"  {_style(_GREEN, 'curl')} {self.url}/v1/{path} \\\n"
            f'    -H "Authorization: Bearer $(cat {key})" \\\n'
            '    -H "Content-Type: application/json" \\\n'
            f"    -d '{body}'\n",
            flush=True,
        )

    def show(self) -> None:
        """Print the addresses, in colour on a terminal."""
        key = shlex.quote(str(self.data_dir / "api_key"))
        if self.secrets.api_key:
            key = f"{self.secrets.api_key}   (kept in {key})"
        rows = [
            ("Console", f"{self.url}/admin/", _user(self.secrets)),
            ("Playground", f"{self.url}/playground", ""),
            ("API", f"{self.url}/v1", f"key: {key}"),
            ("Docs", f"{self.url}/docs", "the endpoints of /v1; README.md and docs/ for the rest"),
            ("Models", ", ".join(self.models) or "none", ""),
            ("Logs", str(self.data_dir / "log"), ""),
        ]
        width = max(len(value) for _, value, remark in rows if remark)
        lines = []
        for name, value, remark in rows:
            shown = f"{value:<{width}}   {remark}" if remark else value
            lines.append(f"  {_style(_BOLD, f'{name:<10}')} {shown}")
        print("\n" + "\n".join(lines) + "\n", flush=True)


def show_secrets(created: FirstSecrets) -> None:
    """Print the password of a first run whose start has failed later: it is shown only once."""
    if created.admin_password:
        print(f"\n  Console    {_user(created)}", flush=True)


def _user(created: FirstSecrets) -> str:
    if not created.admin_password:
        return f"user: {created.admin_name}"
    return f"user: {created.admin_name}   password: {created.admin_password}   (shown once)"


def _style(code: str, text: str) -> str:
    is_plain = not sys.stdout.isatty() or "NO_COLOR" in os.environ
    return text if is_plain else f"{code}{text}{_PLAIN}"
