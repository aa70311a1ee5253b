"""Connections to the Redis that holds request documents, event logs and leases.

``EVENT_LOG_URLS`` may name several servers: everything of one generation lies on one of them,
chosen by its id. Leases and other facts of the whole site lie on the first.
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

# Fail soon rather than hang: the caller answers 503, or retries on its own terms.
_OPTIONS: dict[str, Any] = {"socket_timeout": 2.0, "socket_connect_timeout": 2.0}


def shard_of(generation_id: str) -> int:
    """Return which of the event log servers holds this generation."""
    return zlib.crc32(generation_id.encode()) % len(settings.EVENT_LOG_URLS)


@cache
def _client(url: str) -> redis.Redis:
    return redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0), **_OPTIONS)


def client_for(generation_id: str) -> redis.Redis:
    """Return this process's thread-safe client of the server that holds this generation."""
    return _client(settings.EVENT_LOG_URLS[shard_of(generation_id)])


def site_client() -> redis.Redis:
    """Return this process's thread-safe client for facts of the whole site."""
    return _client(settings.EVENT_LOG_URLS[0])


def broker_client() -> redis.Redis:
    """Return this process's thread-safe client of the server that holds the wake-ups."""
    return _client(settings.BROKER_URL)


def new_async_clients() -> list[redis.asyncio.Redis]:
    """Return one asyncio client for each event log server, for the running loop."""
    retry = AsyncRetry(NoBackoff(), 0)
    return [
        redis.asyncio.Redis.from_url(url, retry=retry, **_OPTIONS)
        for url in settings.EVENT_LOG_URLS
    ]
