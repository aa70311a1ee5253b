"""PostgreSQL, each Redis, the channel layer, and whether the clocks agree."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator
from typing import Any

import redis
from channels.layers import get_channel_layer
from django.conf import settings
from django.db import connection
from django.db.migrations.executor import MigrationExecutor

from inference_site.doctor.finding import Finding, Level, judged
from inference_site.storage.connections import own_connection

_OLDEST_POSTGRES = 140_000
_OLDEST_REDIS = (6, 2)
_ROUND_TRIP_S = 2.0
_CLOCK_WARN_S, _CLOCK_FAIL_S = 0.5, 5.0


def check_postgres() -> Iterator[Finding]:
    """Check its version and the settings that the site relies on."""
    started = time.monotonic()
    with own_connection() as own:
        took_ms = (time.monotonic() - started) * 1000
        number = own.info.server_version
        yield judged(
            "PostgreSQL",
            f"version {number // 10_000}.{number % 10_000}, connected in {took_ms:.0f} ms",
            "Upgrade it to version 14 or newer.",
            fail=number < _OLDEST_POSTGRES,
        )
        config = dict(own.execute("SELECT name, setting FROM pg_settings").fetchall())
        (used,) = own.execute("SELECT count(*) FROM pg_stat_activity").fetchone() or (0,)
    most, pool = int(config["max_connections"]), settings.DATABASES["default"]["OPTIONS"]["pool"]
    yield judged(
        "connections",
        f"{used} of {most} are used; a process takes {pool['max_size']} at most",
        "Raise max_connections, lower DATABASE_POOL, or put PgBouncer in front.",
        warn=most - used < pool["max_size"],
    )
    yield judged(
        "durability",
        f"fsync {config['fsync']}, synchronous_commit {config['synchronous_commit']}",
        "Turn both on: an answer that a client has received must survive a power cut.",
        fail=config["fsync"] != "on",
        warn=config["synchronous_commit"] == "off",
    )
    yield judged(
        "encoding",
        config["server_encoding"],
        "Create the database again with ENCODING 'UTF8'.",
        fail=config["server_encoding"] != "UTF8",
    )


def check_migrations() -> Iterator[Finding]:
    """Look for migrations that are not applied."""
    executor = MigrationExecutor(connection)
    plan = executor.migration_plan(executor.loader.graph.leaf_nodes())
    missing = ", ".join(f"{migration.app_label}.{migration.name}" for migration, _ in plan[:5])
    yield judged(
        "migrations",
        f"{len(plan)} are missing: {missing}" if plan else "all are applied",
        "Run `manage.py migrate`.",
        fail=bool(plan),
    )


def check_redis() -> Iterator[Finding]:
    """Check the version of each Redis, and what it does when memory or power fails."""
    for url, roles in _roles().items():
        with redis.Redis.from_url(url, socket_timeout=2, socket_connect_timeout=2) as client:
            yield from _of_redis(f"Redis ({', '.join(roles)})", client)


def _of_redis(name: str, client: Any) -> Iterator[Finding]:
    info = client.info()
    version = str(info["redis_version"])
    yield judged(
        name,
        f"version {version}, {info['used_memory'] / 2**20:,.0f} MiB used",
        "Upgrade it to version 6.2 or newer.",
        fail=tuple(int(part) for part in version.split(".")[:2]) < _OLDEST_REDIS,
    )
    limit, policy = info.get("maxmemory", 0), str(info.get("maxmemory_policy", "noeviction"))
    yield judged(
        name,
        f"{policy}, limit {limit / 2**20:,.0f} MiB" if limit else f"{policy}, no limit",
        "Set `maxmemory-policy noeviction`: evicted keys are lost streams, requests and counts. "
        "Nearly full: raise maxmemory or lower EVENT_LOG_TTL_S or PROJECT_REDIS_BYTES.",
        fail=policy != "noeviction" and bool(limit),
        warn=bool(limit) and info["used_memory"] > 0.8 * limit,
    )
    persists = bool(info.get("aof_enabled"))
    yield judged(
        name,
        "keeps an append-only file" if persists else "keeps no append-only file",
        "Set `appendonly yes`: otherwise a restart loses running streams, waiting "
        "requests and the counts of limits.",
        warn=not persists,
    )


def check_channel_layer() -> Iterator[Finding]:
    """Send a message through the channel layer and wait for it."""
    took_ms = asyncio.run(_round_trip()) * 1000
    yield Finding(Level.OK, "channel layer", f"a message came back in {took_ms:.1f} ms")


async def _round_trip() -> float:
    layer: Any = get_channel_layer()
    channel = f"doctor.{secrets.token_hex(8)}"
    started = time.monotonic()
    receiving = asyncio.ensure_future(layer.receive(channel))
    try:
        async with asyncio.timeout(_ROUND_TRIP_S):
            # Pub/sub keeps nothing: what is sent before the subscription stands is lost.
            while not receiving.done():
                await layer.send(channel, {"type": "doctor"})
                started = time.monotonic()
                await asyncio.wait({receiving}, timeout=0.1)
    finally:
        receiving.cancel()
        await layer.flush()
    return time.monotonic() - started


def check_clocks() -> Iterator[Finding]:
    """Compare this host's clock with those of PostgreSQL and of each Redis."""
    with own_connection() as own:
        own.execute(
            "SELECT 1"
        )  # The connection is made; from here on only the question takes time.
        yield _clock("PostgreSQL", lambda: _postgres_time(own))
    for url, roles in _roles().items():
        with redis.Redis.from_url(url, socket_timeout=2, socket_connect_timeout=2) as client:
            client.ping()
            yield _clock(f"Redis ({', '.join(roles)})", lambda c=client: _redis_time(c))


def _clock(name: str, ask: Any) -> Finding:
    before = time.time()
    theirs = ask()
    ahead_s = theirs - (before + time.time()) / 2
    return judged(
        f"clock of {name}",
        f"{abs(ahead_s) * 1000:,.0f} ms {'ahead of' if ahead_s > 0 else 'behind'} this host",
        "Synchronise the clocks of all hosts by NTP (chrony, systemd-timesyncd).",
        warn=abs(ahead_s) > _CLOCK_WARN_S,
        fail=abs(ahead_s) > _CLOCK_FAIL_S,
    )


def _postgres_time(own: Any) -> float:
    (now,) = own.execute("SELECT extract(epoch FROM clock_timestamp())::float").fetchone()
    return float(now)


def _redis_time(client: Any) -> float:
    seconds, microseconds = client.time()
    return float(seconds) + float(microseconds) / 1e6


def _roles() -> dict[str, list[str]]:
    """Return each address of Redis, with what it is for."""
    roles: dict[str, list[str]] = {}
    named = (
        ("queues", [settings.BROKER_URL]),
        ("hints", settings.CHANNEL_LAYER_URLS),
        ("event logs", settings.EVENT_LOG_URLS),
        ("limits", [settings.RATE_LIMIT_URL]),
    )
    for role, urls in named:
        for url in urls:
            roles.setdefault(url, []).append(role)
    return roles
