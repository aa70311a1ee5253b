"""The last lines of a model's server, which its worker tells when somebody looks at them.

They may repeat what clients sent, so only people who may change generations see them. They are kept
in Redis for seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

import redis.exceptions

from inference_site.fleet.commands import Command, send
from inference_site.storage.redis import site_client

_KEPT_S = 30
LINES = 100


def lines_of(worker: str, model: str) -> list[str]:
    """Return the lines that the worker has told last, and ask it for the latest ones."""
    try:
        send(worker, Command("log", model))
        found = site_client().get(_key(worker, model))
    except redis.exceptions.RedisError:
        return []
    return found.decode(errors="replace").splitlines() if isinstance(found, bytes) else []


def tell(worker: str, model: str, lines: Sequence[str]) -> None:
    """Keep the latest lines for who looks at them."""
    site_client().set(_key(worker, model), "\n".join(lines[-LINES:]), ex=_KEPT_S)


def _key(worker: str, model: str) -> str:
    return f"server-log:{worker}:{model}"
