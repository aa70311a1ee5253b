"""``Idempotency-Key``: a POST that is sent again gets the answer of the first, and runs once.

A key of the API has its own idempotency keys, each good for a day. What is remembered of a request
is its digest, and either its answer or the generation whose stream is its answer; that is read from
the event log again, for as long as it lies there (``EVENT_LOG_TTL_S``), or made anew from what is
stored. Nothing is answered of a response that was deleted. Of each project the last
``IDEMPOTENCY_KEYS`` are remembered, in at most ``_MOST_BYTES``; older ones are forgotten. A request
that was refused, failed or cancelled is not remembered: sent again, it is a new one. One that runs
goes on for ``GRACE_S`` after its client has left, so that the client can send it again.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import orjson
from django.conf import settings
from django.http import HttpResponse
from django.utils import timezone
from rest_framework.request import Request
from rest_framework.response import Response

from inference_site.accounts.keys import Caller
from inference_site.errors.api_errors import ConflictError, InvalidRequestError
from inference_site.gateway.handoff import HandOff, hand_off, outcome_of
from inference_site.gateway.hub.hub import hub
from inference_site.gateway.hub.past_streams import attach
from inference_site.generations.kinds import Kind, kind_of
from inference_site.generations.models import Generation, Status
from inference_site.storage.redis_clients import site_client

HEADER = "Idempotency-Key"
GRACE_S = 10
_KEPT_S = 86_400
_LARGEST_BODY = 64 * 1024
"""Bytes of an answer that are kept; a larger one is remembered without its body."""
_PENDING_S = 60
"""How long a request may take until it is accepted; after that its process has died."""
_TAKE_OVER = """
if redis.call('get', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('set', KEYS[1], ARGV[2], 'EX', ARGV[3])
return 1
"""
_MOST_BYTES = 8 * 1024 * 1024
# KEYS: memory; of its project, the keys of memories in the order of their times, and the sizes of
# memories by key, with their sum under "". ARGV: the memory; for how long it is kept (s); the most
# memories and the most bytes of the project.
_KEEP = """
local order, sizes, time = KEYS[2], KEYS[3], redis.call("TIME")
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local function forget(key)
  local size = redis.call("HGET", sizes, key)
  if size then redis.call("HINCRBY", sizes, "", -size) end
  redis.call("HDEL", sizes, key)
  redis.call("ZREM", order, key)
end
redis.call("SET", KEYS[1], ARGV[1], "EX", ARGV[2])
for _, key in ipairs(redis.call("ZRANGEBYSCORE", order, "-inf", now - ARGV[2], "LIMIT", 0, 100)) do
  forget(key)
end
forget(KEYS[1])
redis.call("ZADD", order, now, KEYS[1])
redis.call("HSET", sizes, KEYS[1], #ARGV[1])
local bytes = redis.call("HINCRBY", sizes, "", #ARGV[1])
while bytes > tonumber(ARGV[4]) or redis.call("ZCARD", order) > tonumber(ARGV[3]) do
  local oldest = redis.call("ZRANGE", order, 0, 0)[1]
  redis.call("DEL", oldest)
  forget(oldest)
  bytes = tonumber(redis.call("HGET", sizes, ""))
end
redis.call("EXPIRE", order, ARGV[2])
redis.call("EXPIRE", sizes, ARGV[2])
"""
_WELL_FORMED = re.compile(r"[\x21-\x7e]{1,255}")

Handler = Callable[..., HttpResponse]


@dataclass(frozen=True, slots=True)
class _Memory:
    """What is remembered of a request. Without answer and generation it is being accepted."""

    digest: str
    generation_id: str = ""
    stream: bool = False
    grace_s: int = 0
    status: int = 0
    body: str = ""


def once(handler: Handler, caller: Caller, request: Request, *args: Any, **kwargs: Any) -> Any:
    """Answer a POST, or repeat the answer to its first sending.

    Raise InvalidRequestError for a bad key, or one that was sent with another request, and
    ConflictError while the first is being accepted, or when its answer is kept no longer.
    """
    key, mine = _key(request, caller), _Memory(_digest(request))
    known = _remembered(key, mine)
    if known is None:
        with _given_back(key):
            known = _recalled(key, caller, request, mine)
    if known is not None:
        if (answer := _again(request, known)) is not None:
            return answer
        _take_over(key, known, mine)
    with _given_back(key):
        response = handler(request, *args, **kwargs)
    _keep(key, caller, request, response, mine.digest)
    return response


@contextmanager
def _given_back(key: str) -> Iterator[None]:
    """Forget a key that was claimed for what fails."""
    try:
        yield
    except BaseException:
        site_client().delete(key)
        raise


def _key(request: Request, caller: Caller) -> str:
    """Return the key in Redis of this request's memory. Raise InvalidRequestError."""
    given = request.headers[HEADER]
    if not _WELL_FORMED.fullmatch(given):
        raise InvalidRequestError(
            f"Invalid '{HEADER}': expected 1 to 255 visible ASCII characters.", param=HEADER
        )
    return f"idempotent:{caller.api_key_id}:{key_of_row(request)}"


def key_of_row(request: Request) -> str:
    """Return what the row of a generation has of the key; empty without one."""
    given = request.headers.get(HEADER, "")
    return hashlib.sha256(given.encode()).hexdigest() if given else ""


def _digest(request: Request) -> str:
    return hashlib.sha256(request.path.encode() + b"\0" + request.body).hexdigest()


def _packed(memory: _Memory) -> bytes:
    return orjson.dumps(asdict(memory))


def _remembered(key: str, mine: _Memory) -> _Memory | None:
    """Claim the key, or return what it was claimed for."""
    client = site_client()
    if client.set(key, _packed(mine), ex=_PENDING_S, nx=True):
        return None
    found: Any = client.get(key)
    if found is None:  # Its time was up just now.
        return None
    known = _Memory(**orjson.loads(found))
    if known.digest != mine.digest:
        raise InvalidRequestError(
            f"This '{HEADER}' was sent with another request.",
            param=HEADER,
            code="idempotency_key_reused",
        )
    return known


def _recalled(key: str, caller: Caller, request: Request, mine: _Memory) -> _Memory | None:
    """Return what the key was used for, by the rows, if Redis does not know; it is told then."""
    rows = Generation.objects.filter(
        api_key_id=caller.api_key_id, idempotency_key=key_of_row(request)
    ).exclude(status__in=(Status.CANCELLED, Status.FAILED))
    row = rows.first()
    if row is None:
        return None
    if row.created_at < timezone.now() - dt.timedelta(seconds=_KEPT_S):
        rows.update(idempotency_key="")
        return None
    memory = _Memory(mine.digest, row.public_id, row.streamed, 0 if row.background else GRACE_S)
    _remember(key, caller, memory)
    return memory


def _take_over(key: str, known: _Memory, mine: _Memory) -> None:
    """Claim the key of a request that came to nothing; of those who try, one does."""
    arguments = (key, _packed(known), _packed(mine), str(_PENDING_S))
    if not site_client().eval(_TAKE_OVER, 1, *arguments):
        raise in_progress()


def in_progress() -> ConflictError:
    """Return the error of a request whose first sending is not accepted yet."""
    return ConflictError(
        "The same request is being accepted. Please try again.", code="idempotency_in_progress"
    )


def _expired() -> ConflictError:
    return ConflictError(
        "The request was answered; its answer is not kept.", code="idempotency_expired"
    )


def _keep(key: str, caller: Caller, request: Request, response: HttpResponse, digest: str) -> None:
    outcome = outcome_of(request)
    if (handoff := outcome.handoff) is not None:
        grace_s = handoff.follower.grace_s
        memory = _Memory(digest, handoff.generation_id, handoff.stream, grace_s)
    elif outcome.wait is None and isinstance(response, Response) and response.status_code < 400:
        body = orjson.dumps(response.data)
        kept = body.decode() if len(body) <= _LARGEST_BODY else ""
        shown_id = str(response.data.get("id", "")) if isinstance(response.data, dict) else ""
        memory = _Memory(digest, shown_id, status=response.status_code, body=kept)
    else:
        site_client().delete(key)
        return
    _remember(key, caller, memory)


def _remember(key: str, caller: Caller, memory: _Memory) -> None:
    of_project = f"idempotency:{caller.project_id}"
    limits = (_KEPT_S, settings.IDEMPOTENCY_KEYS, _MOST_BYTES)
    keys = (key, of_project, f"{of_project}:sizes")
    site_client().eval(_KEEP, len(keys), *keys, _packed(memory), *limits)


def _again(request: Request, known: _Memory) -> HttpResponse | None:
    """Return the first answer; None when that came to nothing."""
    if known.status and _is_deleted(known.generation_id):
        raise _expired()
    if known.body:
        return Response(orjson.loads(known.body), status=known.status)
    if known.status:
        raise _expired()
    if not known.generation_id:
        raise in_progress()
    generation = Generation.objects.filter(public_id=known.generation_id).first()
    if generation is None or generation.status in (Status.CANCELLED, Status.FAILED):
        return None
    has_ended = generation.status == Status.COMPLETED
    return _followed(request, known, kind_of(generation.kind), has_ended=has_ended)


def _is_deleted(public_id: str) -> bool:
    """Whether an answer shows something of a generation that was deleted since."""
    kinds = Generation.objects.filter(public_id=public_id).values_list("kind", flat=True)
    name = kinds.first() if public_id else None
    is_deleted = None if name is None else kind_of(name).is_deleted
    return is_deleted is not None and is_deleted(public_id)


def _followed(
    request: Request, known: _Memory, kind: Kind[Any], *, has_ended: bool
) -> HttpResponse:
    """Hand the stream of the first answer over, from its beginning."""
    follower = hub.follow(known.generation_id, grace_s=known.grace_s)
    remake = None
    try:
        logged = attach(follower, has_ended=has_ended)
        if logged is None:
            remake = kind.replay(known.generation_id) if kind.replay else None
            if remake is None:
                raise _expired()
    except BaseException:
        hub.leave(follower)
        raise
    handoff = HandOff(
        follower,
        known.stream,
        known=logged or (),
        remake=remake,
        cancels=False,
        lines=kind.lines,
    )
    return hand_off(request, handoff)
