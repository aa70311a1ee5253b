"""Keys of the served stack, with what holds them back."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from typing import Any

import httpx

from tests.served_stack import ServedStack


@dataclass(frozen=True, slots=True)
class MadeKey:
    """A key of a project of its own."""

    secret: str
    id: int
    project_id: int

    def http(self, stack: ServedStack) -> httpx.Client:
        """A client that sends the key; many may use it at once."""
        return httpx.Client(
            base_url=stack.url,
            headers={"Authorization": f"Bearer {self.secret}"},
            timeout=120,
            limits=httpx.Limits(max_connections=None),
            event_hooks={"response": [stack.check.watch]},
        )


def make_key(stack: ServedStack, *scopes: str, **fields: Any) -> MadeKey:
    """Make a key whose columns have these values; those of its project begin with ``project_``."""
    secret = f"sk-{secrets.token_urlsafe(36)}"
    name = f"k-{secret[-12:]}"
    own = {k: v for k, v in fields.items() if not k.startswith("project_")}
    projects = {k.removeprefix("project_"): v for k, v in fields.items() if k not in own}
    project_id = insert(stack, "accounts_project", name=name, is_active=True, **projects)
    key = {
        "project_id": project_id,
        "name": name,
        "prefix": secret[:10],
        "scopes": list(scopes) or ["inference", "usage:read"],
        "allowed_models": [],
        **own,
    }
    key_id = insert(stack, "accounts_apikey", **key)
    digest = hashlib.sha256(secret.encode()).hexdigest()
    insert(stack, "accounts_keysecret", api_key_id=key_id, digest=digest)
    return MadeKey(secret, key_id, project_id)


def insert(stack: ServedStack, table: str, **row: Any) -> int:
    """Insert a row that is made now; return its primary key."""
    columns, marks = ", ".join([*row, "created_at"]), ", ".join(["%s"] * len(row))
    statement = f"INSERT INTO {table} ({columns}) VALUES ({marks}, now()) RETURNING id"  # noqa: S608
    [(id_,)] = stack.sql(statement, *row.values())
    return int(id_)


def make_budget(
    stack: ServedStack, key: MadeKey, amount: float, unit: str = "tokens", each: str = ""
) -> None:
    """Give the key's project a budget for the day, or ``each`` of a dimension."""
    budget = {"project_id": key.project_id, "unit": unit, "every": "day", "amount": amount}
    budget["each"] = each
    insert(stack, "accounts_budget", **budget)
