"""The checks of ``manage.py doctor``: the host, PostgreSQL and Redis, models, workers, rows."""

from __future__ import annotations

import asyncio
import os
import platform
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psycopg
import redis
from channels.layers import get_channel_layer
from django.conf import settings
from django.contrib.auth.models import Group
from django.core.exceptions import ImproperlyConfigured
from django.db import connection
from django.db.migrations.executor import MigrationExecutor
from django.db.models.functions import Now

from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.engines.registry import LIBRARIES
from inference_site.catalogue.fleet.fleet import why_no_host
from inference_site.catalogue.fleet.leases import live_workers
from inference_site.catalogue.gguf_files import parts_of
from inference_site.catalogue.model_files import model_file_error
from inference_site.catalogue.model_store.entries import (
    entry_error,
    private_address_error,
    refresh_catalogue,
)
from inference_site.catalogue.model_store.models import StoredModel
from inference_site.core import environment
from inference_site.core.storage.capacity import disks, existing, memory_of
from inference_site.core.storage.postgresql import (
    DATABASE_UNAVAILABLE,
    TIMEOUTS,
    LosesPreparedStatements,
    NotMigrated,
    fault_of_database,
    is_timeout,
    unpooled_connection,
)
from inference_site.core.storage.redis import REDIS_UNAVAILABLE, takes_writes
from inference_site.mcp.access import credentials_error
from inference_site.mcp.connections import is_readable
from inference_site.mcp.models import McpConnection, McpServer
from inference_site.ops.serve.services import missing_fixes, newest_redis
from inference_site.runs.kinds import mendings
from inference_site.runs.maintenance import last_maintained
from inference_site.runs.models import Generation, Status
from inference_site.runs.streams.batches import is_whole
from inference_site.runs.streams.event_log import read_log
from inference_site.runs.streams.redis_memory import FOR_REQUESTS

_GIB = 2**30
_PACKAGES = ("django", "celery", "channels", "daphne", "redis", "psycopg", *LIBRARIES.values())
_OLDEST_POSTGRES = 140_000
_OLDEST_REDIS = (6, 2)
_ROUND_TRIP_S = 2.0
_TURNS = 4
_CLOCK_WARN_S, _CLOCK_FAIL_S = 0.5, 5.0
_MAINTENANCE_S = 10.0
_MEMORY_WARN_PERCENT = 80
_FIX_FILE = (
    "Correct `file` in the models file or the console, fetch it by `manage.py pull`, or let this "
    "user read it."
)
_FIX_ENTRY = "Edit it in the console, or move it into the models file, which may name anything."
_FIX_ADDRESS = (
    "Set UPSTREAM_ALLOWED_HOSTS or UPSTREAM_ALLOWED_NETWORKS, or move it into the models file."
)
FIX_DATABASE = (
    "Start PostgreSQL, or correct address, role, password or database in DATABASE_URL; `manage.py "
    "serve` starts one of its own."
)
_FIX_TIMEOUT = (
    "PostgreSQL runs, but a lock or a time limit stopped this: see `SELECT * FROM pg_locks WHERE "
    "NOT granted`, its load, and statement_timeout and lock_timeout of the role."
)
_FIX_CONNECTIONS = "Raise max_connections, lower DATABASE_POOL, or put PgBouncer in front."
_NO_CONNECTION_LEFT = re.compile(r"too many (clients|connections)|connection slots")
"""What PostgreSQL says then; psycopg has no class for errors of a new connection."""
FIX_REDIS = "Start Redis, or correct REDIS_URL (BROKER_URL, CHANNEL_LAYER_URLS, EVENT_LOG_URLS)."
_OVERDUE_S = 60
"""Maintenance should have ended a run of a dead worker long before this age."""
_MAX_LOGS = 200


class Level(StrEnum):
    """How severe a finding is."""

    OK = "ok"
    WARN = "warn"  # It works now, but not for long or not for everybody.
    FAIL = "fail"  # Requests fail, or will at the next restart.


@dataclass(frozen=True, slots=True)
class Finding:
    """One result: what was checked, what was found, and how to fix it; no fix if all is well."""

    level: Level
    what: str
    found: str
    fix: str = ""


Check = Callable[[], Iterable[Finding]]


def graded(what: str, found: str, fix: str, *, warn: bool = False, fail: bool = False) -> Finding:
    """Return a finding of the worst level whose condition holds."""
    level = Level.FAIL if fail else Level.WARN if warn else Level.OK
    return Finding(level, what, found, "" if level == Level.OK else fix)


def guarded(what: str, check: Check, fix: str) -> list[Finding]:
    """Run a check and return its findings; an exception is a finding after them."""
    findings: list[Finding] = []
    try:
        findings.extend(check())
    except Exception as exc:  # noqa: BLE001  # Anything may be broken.
        found = f"{type(exc).__name__}: {fault_of_database(exc)}".rstrip(": ")
        findings.append(Finding(Level.FAIL, what, found, _fix_of(exc, fix)))
    return findings


def _fix_of(error: Exception, otherwise: str) -> str:
    """Return the fix for a service that does not answer, or has stopped a statement."""
    if isinstance(error, REDIS_UNAVAILABLE):
        return FIX_REDIS
    if is_timeout(error) or isinstance(error, TIMEOUTS):
        return _FIX_TIMEOUT
    if isinstance(error.__cause__, NotMigrated):
        return "Run `manage.py migrate`."
    if isinstance(error, (*DATABASE_UNAVAILABLE, psycopg.OperationalError)):
        return _FIX_CONNECTIONS if _NO_CONNECTION_LEFT.search(str(error)) else FIX_DATABASE
    if isinstance(error, ImproperlyConfigured) and otherwise in (FIX_DATABASE, FIX_REDIS):
        return "Correct the setting or the file that it names."
    return otherwise


def check_versions() -> Iterator[Finding]:
    """Report the versions that are installed."""
    yield graded(
        "Python",
        f"{platform.python_version()}, site {settings.VERSION}",
        "Install Python 3.11 or newer and make .venv again.",
        fail=sys.version_info < (3, 11),
    )
    versions = []
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            versions.append(f"{package} is not installed")
    yield Finding(Level.OK, "packages", ", ".join(versions))


def check_bundled_redis() -> Iterator[Finding]:
    """Report the Redis that ``serve`` starts, if it does, and which fixes a bundled one lacks."""
    if environment.asked().get("REDIS_URL", ("", ""))[1] not in ("serve", "default"):
        return
    newest = newest_redis()
    if newest is None:
        return
    missing = missing_fixes(newest.version) if newest.is_bundled else []
    yield graded(
        "Redis of serve",
        f"{newest.path}, version {newest.shown_version}"
        + (", bundled: it gets no security fixes" if newest.is_bundled else "")
        + (f", and lacks those for {', '.join(missing)}" if missing else ""),
        "Install redis-server 7.2 or valkey-server 8, or newer; serve takes the newest at its "
        "next start. Only the user who runs serve reaches it, through a socket.",
        warn=newest.is_bundled,
    )


def check_settings() -> Iterator[Finding]:
    """Check settings that are easily forgotten."""
    try:
        length = len(settings.SECRET_KEY)
    except ImproperlyConfigured:  # Django refuses an empty one when it is read.
        length = 0
    yield graded(
        "SECRET_KEY",
        f"{length} characters",
        "Set SECRET_KEY (or SECRET_KEY_FILE) to 50 random characters, the same for each process.",
        fail=not length,
        warn=length < 32,
    )
    yield graded(
        "DEBUG",
        "on" if settings.DEBUG else "off",
        "Set DEBUG=false: error pages show settings and data to everybody.",
        warn=settings.DEBUG,
    )


def check_single_sign_on() -> Iterator[Finding]:
    """Check that the roles of ``OIDC_ROLES`` exist: others are given to nobody."""
    if not settings.OIDC_ISSUER:
        return
    roles = set(settings.OIDC_ROLES.values())
    missing = roles - set(Group.objects.filter(name__in=roles).values_list("name", flat=True))
    yield graded(
        "single sign-on",
        f"roles of OIDC_ROLES that do not exist: {', '.join(sorted(missing))}"
        if missing
        else f"OIDC_ROLES gives {', '.join(sorted(roles)) or 'no role'}",
        "Name roles of the page Roles in OIDC_ROLES: whoever gets none is refused.",
        warn=bool(missing) or not roles,
    )


def check_disk() -> Iterator[Finding]:
    """Check the folders for data, models and files: their free space, and what the user may do."""
    for disk in disks():
        free, total = disk.free_bytes, disk.total_bytes
        if not total:
            yield Finding(
                Level.FAIL,
                disk.setting,
                f"{disk.folder}: nothing can be stored there, because it is on no disk",
                f"Name a folder on a disk in {disk.setting}.",
            )
            continue
        yield graded(
            disk.setting,
            f"{disk.folder}: {free / _GIB:,.1f} of {total / _GIB:,.1f} GiB free",
            f"Make room there, or move {disk.setting} to a larger disk.",
            warn=free < max(5 * _GIB, total // 20),
            fail=free < _GIB,
        )
    folder = existing(Path(settings.MODELS_DIR))
    if not os.access(folder, os.R_OK | os.X_OK):
        yield Finding(
            Level.WARN,
            "MODELS_DIR",
            f"{folder}: user {os.getuid()} cannot read it, so its files are left out",
            "Let that user read the folder and its files.",
        )
    folder = existing(Path(settings.FILES_DIR))
    if not settings.FILES_BUCKET and not os.access(folder, os.W_OK | os.X_OK):
        yield Finding(
            Level.FAIL,
            "FILES_DIR",
            f"{folder}: user {os.getuid()} cannot write there, so uploads and batches fail",
            "Make it a folder of the user that the web processes and beat run as.",
        )


def check_postgres() -> Iterator[Finding]:
    """Check its version and the settings that the site relies on."""
    started = time.monotonic()
    with unpooled_connection() as database:
        took_ms = (time.monotonic() - started) * 1000
        number = database.info.server_version
        yield graded(
            "PostgreSQL",
            f"version {number // 10_000}.{number % 10_000}, connected in {took_ms:.0f} ms",
            "Upgrade it to version 14 or newer.",
            fail=number < _OLDEST_POSTGRES,
        )
        config = dict(database.execute("SELECT name, setting FROM pg_settings").fetchall())
        (used,) = database.execute("SELECT count(*) FROM pg_stat_activity").fetchone() or (0,)
        (is_read_only,) = database.execute("SHOW transaction_read_only").fetchone() or ("off",)
    if is_read_only == "on":
        yield Finding(
            Level.FAIL,
            "writes",
            "it takes no writes",
            "Use the address of the primary, and a role without default_transaction_read_only.",
        )
    yield from _session_settings(config)
    allowed, pool = int(config["max_connections"]), settings.DATABASES["default"]["OPTIONS"]["pool"]
    yield graded(
        "connections",
        f"{used} of {allowed} are used; a process takes {pool['max_size']} at most",
        _FIX_CONNECTIONS,
        warn=allowed - used < pool["max_size"],
    )
    yield graded(
        "durability",
        f"fsync {config['fsync']}, synchronous_commit {config['synchronous_commit']}",
        "Turn both on: an answer that a client has received must survive a power cut.",
        fail=config["fsync"] != "on",
        warn=config["synchronous_commit"] == "off",
    )
    yield graded(
        "encoding",
        config["server_encoding"],
        "Create the database again with ENCODING 'UTF8'.",
        fail=config["server_encoding"] != "UTF8",
    )


def _session_settings(config: Mapping[str, str]) -> Iterator[Finding]:
    """Report what server, database or role set for sessions, and the site cannot use."""
    for name, needed in (
        ("DateStyle", "ISO"),
        ("default_transaction_isolation", "read committed"),
    ):
        if config[name].partition(",")[0] != needed:
            yield Finding(
                Level.FAIL,
                "session",
                f"{name} is {config[name]}",
                f"Have sessions begin with {needed}: see `ALTER ROLE … RESET {name}`.",
            )
    longest_ms = 1000 * settings.DATABASE_LONG_TIMEOUT_S
    for name in ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout"):
        if 0 < int(config[name]) < longest_ms:
            yield Finding(
                Level.WARN,
                "session",
                f"{name} is {config[name]} ms",
                "The site has limits of its own (DATABASE_TIMEOUT_S, DATABASE_LONG_TIMEOUT_S); "
                f"a shorter one makes requests and `migrate` fail: `ALTER ROLE … SET {name} = 0`.",
            )


def check_prepared_statements() -> Iterator[Finding]:
    """Prepare a statement as requests do, on connections that take turns.

    A pooler with transaction pooling gives each turn another session. Before PgBouncer 1.21, and
    without ``max_prepared_statements``, that session has not the statement, or that of another.
    """
    fault = ""
    with unpooled_connection() as one, unpooled_connection() as other:
        try:
            for client in (one, other) * _TURNS:
                client.execute("SELECT 1", prepare=True)
                client.commit()
        except LosesPreparedStatements as exc:
            fault = str(exc)
    yield graded(
        "prepared statements",
        fault or "are kept",
        "Set PREPARED_STATEMENTS=false, or use PgBouncer 1.21 or newer with "
        "max_prepared_statements above 0, or session pooling.",
        fail=bool(fault),
    )


def check_migrations() -> Iterator[Finding]:
    """Check that all migrations are applied."""
    executor = MigrationExecutor(connection)
    plan = executor.migration_plan(executor.loader.graph.leaf_nodes())
    missing = ", ".join(f"{migration.app_label}.{migration.name}" for migration, _ in plan[:5])
    yield graded(
        "migrations",
        f"{len(plan)} are missing: {missing}" if plan else "all are applied",
        "Run `manage.py migrate`.",
        fail=bool(plan),
    )


def check_redis() -> Iterator[Finding]:
    """Check the version of each Redis, and what it does when memory or power fails."""
    for url, roles in _redis_roles().items():
        name = f"Redis ({', '.join(roles)})"
        with redis.Redis.from_url(url, socket_timeout=2, socket_connect_timeout=2) as client:
            info: Any = client.info()
            memory = memory_of(client)
            is_writable = takes_writes(client)
        version = str(info["redis_version"])
        yield graded(
            name,
            f"version {version}, {memory.used_bytes / 2**20:,.0f} MiB used",
            "Upgrade it to version 6.2 or newer.",
            fail=tuple(int(part) for part in version.split(".")[:2]) < _OLDEST_REDIS,
        )
        if not is_writable:
            yield Finding(
                Level.FAIL,
                name,
                f"it takes no writes; its role is {info['role']}",
                "Use the address of the primary; for a primary, see the log of Redis.",
            )
        limit, policy = memory.limit_bytes, memory.policy
        yield graded(
            name,
            f"{policy}, limit {limit / 2**20:,.0f} MiB" if limit else f"{policy}, no limit",
            "Set `maxmemory-policy noeviction`: evicted keys are lost streams, requests and "
            "counts.",
            fail=policy != "noeviction" and bool(limit),
        )
        if limit:
            refused_from = 100 * FOR_REQUESTS
            yield graded(
                name,
                f"{memory.percent:.0f} % of its limit is used",
                "Raise maxmemory, or lower EVENT_LOG_TTL_S or PROJECT_REDIS_BYTES: from "
                f"{refused_from:.0f} % on, new requests get 503 `queue_memory_full`.",
                warn=memory.percent > _MEMORY_WARN_PERCENT,
                fail=memory.percent >= refused_from and "event logs" in roles,
            )
        persists = bool(info.get("aof_enabled"))
        yield graded(
            name,
            "keeps an append-only file" if persists else "keeps no append-only file",
            "Set `appendonly yes`: otherwise a restart loses running streams, waiting "
            "requests and the counts of limits.",
            warn=not persists,
        )


def check_channel_layer() -> Iterator[Finding]:
    """Send a message through the channel layer and receive it."""

    async def round_trip() -> float:
        layer: Any = get_channel_layer()
        channel = f"doctor.{secrets.token_hex(8)}"
        started = time.monotonic()
        receiving = asyncio.ensure_future(layer.receive(channel))
        try:
            async with asyncio.timeout(_ROUND_TRIP_S):
                # Pub/sub stores nothing: a message that is sent before the subscription is lost.
                while not receiving.done():
                    await layer.send(channel, {"type": "doctor"})
                    started = time.monotonic()
                    await asyncio.wait({receiving}, timeout=0.1)
        finally:
            receiving.cancel()
            await layer.flush()
        return time.monotonic() - started

    took_ms = asyncio.run(round_trip()) * 1000
    yield Finding(Level.OK, "channel layer", f"a message came back in {took_ms:.1f} ms")


def check_clocks() -> Iterator[Finding]:
    """Compare this host's clock with those of PostgreSQL and of each Redis."""
    with unpooled_connection() as database:
        database.execute("SELECT 1")  # Connects, so that only the next statement is timed.

        def postgres_time() -> float:
            query = "SELECT extract(epoch FROM clock_timestamp())::float"
            (now,) = database.execute(query).fetchone() or (0.0,)
            return float(now)

        yield _clock("PostgreSQL", postgres_time)
    for url, roles in _redis_roles().items():
        with redis.Redis.from_url(url, socket_timeout=2, socket_connect_timeout=2) as client:
            client.ping()

            def redis_time(client: Any = client) -> float:
                seconds, microseconds = client.time()
                return float(seconds) + float(microseconds) / 1e6

            yield _clock(f"Redis ({', '.join(roles)})", redis_time)


def _clock(name: str, read_time: Callable[[], float]) -> Finding:
    before = time.time()
    ahead_s = read_time() - (before + time.time()) / 2
    return graded(
        f"clock of {name}",
        f"{abs(ahead_s) * 1000:,.0f} ms {'ahead of' if ahead_s > 0 else 'behind'} this host",
        "Synchronise the clocks of all hosts by NTP (chrony, systemd-timesyncd).",
        warn=abs(ahead_s) > _CLOCK_WARN_S,
        fail=abs(ahead_s) > _CLOCK_FAIL_S,
    )


def _redis_roles() -> dict[str, list[str]]:
    """Return the address of each Redis, with its roles."""
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


def check_models() -> Iterator[Finding]:
    """Check the file of each model, the entries of the database, and models that settings name."""
    refresh_catalogue()
    for spec in catalogue().models.values():
        what, fault = f"model {spec.id}", model_file_error(spec)
        if fault:
            yield Finding(Level.FAIL, what, fault, _FIX_FILE)
        elif spec.file is None:
            yield Finding(Level.OK, what, f"needs no file ({spec.engine})")
        else:
            size = sum(part.stat().st_size for part in parts_of(spec.file))
            yield Finding(Level.OK, what, f"{spec.file} ({size / 2**20:,.0f} MiB)")
    for stored in StoredModel.objects.all():
        what = f"model {stored.model_id}"
        if fault := entry_error(stored):
            yield Finding(Level.FAIL, what, f"it is not served: {fault}", _FIX_ENTRY)
        elif stored.any_address and (fault := private_address_error(stored)):
            yield Finding(Level.WARN, what, f"served until it is edited: {fault}", _FIX_ADDRESS)
    for setting in ("DEFAULT_MODEL", "EMBEDDING_MODEL"):
        if (name := getattr(settings, setting)) and catalogue().named(name) is None:
            fix = "Correct the setting, or add the model."
            yield Finding(Level.FAIL, setting, f"there is no model '{name}'", fix)


def check_mcp_servers() -> Iterator[Finding]:
    """Check that credentials for MCP servers were encrypted with this ``SECRET_KEY``."""
    for server in McpServer.objects.exclude(credentials="", oauth_secret=""):
        error = credentials_error(server)
        yield graded(
            f"MCP server {server.label}",
            error or "its credentials can be read",
            "Set the SECRET_KEY from before, or write its headers and client secret again in the "
            "console.",
            fail=bool(error),
        )
    ended = [one for one in McpConnection.objects.exclude(grant="") if not is_readable(one)]
    if ended:
        yield Finding(
            Level.WARN,
            "connections to MCP servers",
            f"{len(ended)} were encrypted with another SECRET_KEY",
            "Set the SECRET_KEY from before, or let the users connect again: My connections.",
        )


def check_workers() -> Iterator[Finding]:
    """Check that workers live, run this release, and serve every model."""
    workers = live_workers()
    yield graded(
        "workers",
        f"{len(workers)} live",
        "Start `manage.py worker` on a host with the models; see its log when it ends.",
        fail=not workers,
    )
    for worker in workers:
        served = ", ".join(f"{m.id} {m.state} {m.busy}/{m.slots}" for m in worker.models)
        yield graded(
            f"worker {worker.id}",
            f"release {worker.release or 'unknown'}: {served or 'no model'}",
            f"Restart it with this release, {settings.VERSION}.",
            warn=worker.release != settings.VERSION,
        )
    for model, spec in catalogue().models.items():
        if workers and (why := why_no_host(spec, workers)):
            fix = "Name it in the WORKER_LABELS of a worker, or change `hosts` of the entry."
            yield Finding(Level.WARN, f"model {model}", why, fix)
        elif workers and not any(worker.serves(model) for worker in workers):
            yield Finding(
                Level.WARN,
                f"model {model}",
                "no live worker serves it",
                f"Start one with `manage.py worker --models {model}`, or load it in the admin.",
            )


def check_maintenance() -> Iterator[Finding]:
    """Check that maintenance runs."""
    at = last_maintained()
    ago_s = None if at is None else time.time() - at
    yield graded(
        "maintenance",
        "not done for a minute" if ago_s is None else f"done {ago_s:.1f} s ago",
        "Start `manage.py beat`; without it nobody notices dead workers and lost wake-ups.",
        fail=ago_s is None or ago_s > _MAINTENANCE_S,
    )


def check_rows() -> Iterator[Finding]:
    """Check that runs of dead workers have ended, and that stored results agree with their rows."""
    old = Generation.objects.filter(
        status=Status.RUNNING, claimed_at__lt=Now() - timedelta(seconds=_OVERDUE_S)
    )
    count = old.exclude(worker__in=[worker.id for worker in live_workers()]).count()
    yield graded(
        "runs of dead workers",
        f"{count} for more than {_OVERDUE_S} s",
        "Maintenance ends them: see why it does not in the log of `manage.py beat`.",
        fail=bool(count),
    )
    contradictions = (pair for app in mendings() for pair in app.contradictions().items())
    for what, number in contradictions:
        yield graded(
            what,
            str(number),
            "Maintenance mends them: see why it does not in the log of `manage.py beat`.",
            fail=bool(number),
        )


def check_logs() -> Iterator[Finding]:
    """Check that no frames are missing in the event logs of running generations."""
    running = Generation.objects.filter(status=Status.RUNNING).order_by("-id")
    ids = list(running.values_list("public_id", flat=True)[:_MAX_LOGS])
    incomplete = [public_id for public_id in ids if not is_whole(read_log(public_id))]
    yield graded(
        "event logs",
        f"{len(incomplete)} of {len(ids)} running streams have lost frames: "
        f"{', '.join(incomplete[:3])}"
        if incomplete
        else f"{len(ids)} running streams are whole",
        "Their readers get an error, stored responses are not affected. Redis was flushed, evicted "
        "keys or lost its last writes: set `appendonly yes` and `maxmemory-policy noeviction`.",
        warn=bool(incomplete),
    )
