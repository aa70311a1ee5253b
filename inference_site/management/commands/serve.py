"""``manage.py serve``: run the whole stack on this host with one command."""

from __future__ import annotations

import signal
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError

from inference_site import environment
from inference_site.catalogue.catalogue import catalogue
from inference_site.supervisor.preparation import FirstSecrets, prepare_site
from inference_site.supervisor.services import ServiceError
from inference_site.supervisor.stack import Stack

_READY_TIMEOUT_S = 60.0


class Command(BaseCommand):
    """Runs until SIGINT or SIGTERM arrives."""

    help = "Run everything on this host: PostgreSQL, Redis, web, worker and beat."
    requires_system_checks: list[str] = []  # The children run them in their own environment.

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--host", default=environment.text("HOST", "127.0.0.1"))
        parser.add_argument("--port", type=int, default=environment.number("PORT", 8000))

    def handle(self, *_: Any, host: str, port: int, **__: Any) -> None:
        started = time.monotonic()
        signal.signal(
            signal.SIGTERM, signal.default_int_handler
        )  # SIGTERM stops a start-up in the same way as Ctrl-C.
        _require_catalogue()
        data_dir: Path = settings.DATA_DIR
        data_dir.mkdir(parents=True, exist_ok=True)
        stack = Stack(data_dir, host, port, _say)
        try:
            stack.start_services()
            stack.start_processes()
            _show_secrets(_prepared(stack, data_dir), data_dir)
            url = _url(host, port)
            _wait_until_ready(url, stack)
            _say(f"ready in {time.monotonic() - started:.1f} s")
            _welcome(stack, url, data_dir)
            stack.watch()
        except ServiceError as exc:
            raise CommandError(str(exc)) from exc
        except KeyboardInterrupt:
            pass
        finally:
            _say("stopping")
            stack.stop()
        _say("stopped")


def _require_catalogue() -> None:
    """Raise CommandError for an invalid models file before anything is started."""
    try:
        catalogue()
    except ImproperlyConfigured as exc:
        raise CommandError(str(exc)) from exc


def _url(host: str, port: int) -> str:
    """Return the address of the site for a client on this host."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  # Only compared.
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def _say(line: str) -> None:
    print(f"[serve] {line}", flush=True)


def _wait_until_ready(url: str, stack: Stack) -> None:
    """Return when the site can answer a completion, or after a minute with a message."""
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/health/ready", timeout=5):  # noqa: S310  # Our own address.
                return
        except (urllib.error.URLError, OSError):
            stack.restart_dead()
            time.sleep(0.1)
    _say("the site is not ready after a minute; see the logs")


def _prepared(stack: Stack, data_dir: Path) -> FirstSecrets:
    """Prepare the site while its processes start. Raise ServiceError."""
    try:
        return prepare_site(stack.database_url, data_dir)
    except DatabaseError as exc:
        raise ServiceError(f"The database could not be prepared: {exc}") from exc


def _show_secrets(made: FirstSecrets, data_dir: Path) -> None:
    """Print the secrets of a first run at once, in case a later step fails."""
    if made.admin_password:
        print(f"\n  admin     user: admin   password: {made.admin_password}   (shown once)")
    if made.api_key:
        print(f"  API key   {made.api_key}   (shown once; kept in {data_dir / 'api_key'})\n")
    sys.stdout.flush()


def _welcome(stack: Stack, url: str, data_dir: Path) -> None:
    names = ", ".join(f"{name} ({pid})" for name, pid in stack.processes())
    model = next(iter(catalogue().models))
    print(
        f"\n  running   {names}\n"
        f"  logs      {data_dir / 'log'}\n"
        f"  models    {', '.join(catalogue().models)}\n"
        f"  API       {url}/v1\n"
        f"  admin     {url}/admin/\n"
        f"  playground {url}/playground\n\n"
        f"  curl {url}/v1/chat/completions \\\n"
        f'    -H "Authorization: Bearer $(cat {data_dir / "api_key"})" \\\n'
        '    -H "Content-Type: application/json" \\\n'
        f'    -d \'{{"model": "{model}", "stream": true, '
        '"messages": [{"role": "user", "content": "Tell me a story."}]}\'\n'
    )
    sys.stdout.flush()
