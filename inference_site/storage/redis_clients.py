"""Clients of the Redis servers that hold request documents, event logs, leases and wake-ups.

``EVENT_LOG_URLS`` may name several servers. The id of a generation selects the one server that
holds all its keys. Leases and other keys of the whole site are on the first server.
"""

from __future__ import annotations

import zlib
from functools import cache
from typing import Any

import redis
import redis.asyncio
from django.conf import settings
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry


def client_options(timeout_s: float | None = None) -> dict[str, Any]:
    """Return options with which a client fails early; the default is ``REDIS_TIMEOUT_S``.

    The caller answers 503, or decides itself whether to retry.
    """
    limit_s = settings.REDIS_TIMEOUT_S if timeout_s is None else timeout_s
    return {
        "socket_timeout": limit_s,
        "socket_connect_timeout": limit_s,
        "retry": Retry(NoBackoff(), 0),
    }


def shard_of(generation_id: str) -> int:
    """Return the index of the event log server that holds this generation."""
    return zlib.crc32(generation_id.encode()) % len(settings.EVENT_LOG_URLS)


@cache
def _client(url: str) -> redis.Redis:
    return redis.Redis.from_url(url, **client_options())


def client_for(generation_id: str) -> redis.Redis:
    """Return this process's thread-safe client of the server that holds this generation."""
    return _client(settings.EVENT_LOG_URLS[shard_of(generation_id)])


def all_clients() -> list[redis.Redis]:
    """Return this process's thread-safe clients of all event log servers."""
    return [_client(url) for url in settings.EVENT_LOG_URLS]


def memory_of(client: redis.Redis) -> tuple[int, int]:
    """Return how many bytes a server uses and may use; 0 for no bound."""
    memory: Any = client.info("memory")
    return int(memory["used_memory"]), int(memory.get("maxmemory", 0))


def site_client() -> redis.Redis:
    """Return this process's thread-safe client for keys of the whole site."""
    return _client(settings.EVENT_LOG_URLS[0])


def broker_client() -> redis.Redis:
    """Return this process's thread-safe client of the server that holds the wake-ups."""
    return _client(settings.BROKER_URL)


def new_async_clients() -> list[redis.asyncio.Redis]:
    """Return one asyncio client for each event log server, for the running event loop."""
    options = {**client_options(), "retry": AsyncRetry(NoBackoff(), 0)}
    return [redis.asyncio.Redis.from_url(url, **options) for url in settings.EVENT_LOG_URLS]
