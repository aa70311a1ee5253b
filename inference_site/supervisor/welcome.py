"""What ``manage.py serve`` says when the site is ready: addresses, secrets, a first request."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from inference_site.supervisor.preparation import FirstSecrets

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
