"""``Idempotency-Key``: a POST that is sent again gets the answer of the first, and runs once.

A key of the API has its own idempotency keys, each good for a day. What is remembered of a request
(``KeyedRequest``) is its digest, and either its answer or the generation whose stream is its
answer; that is read from the event log again, for as long as it lies there (``EVENT_LOG_TTL_S``),
or rebuilt from what is stored. Nothing is answered of a response that was deleted. A request that
was refused, failed or cancelled is not remembered: sent again, it is a new one. One that runs goes
on for ``GRACE_S`` after its client has left, so that the client can send it again.

Requests of three kinds are told apart. One that generates has its row written in the transaction of
the generation's row (``submission.submit``). One that writes objects has its row written first, in
the same transaction as these. Other requests, such as a cancel, do no harm when they are done
twice: their answer is remembered after it was made.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import orjson
from django.db import DatabaseError, transaction
from django.http import HttpResponse
from django.utils import timezone
from rest_framework.request import Request
from rest_framework.response import Response

from inference_site.accounts.keys import Caller
from inference_site.errors.api_errors import ConflictError, InvalidRequestError
from inference_site.gateway.handoff import HandOff, hand_off, outcome_of
from inference_site.gateway.hub import attach, hub
from inference_site.generations.kinds import kind_of
from inference_site.generations.models import Generation, Status
from inference_site.idempotency.models import (
    KEPT_S,
    KeyClaim,
    KeyHeld,
    KeyTaken,
    Known,
    find,
    trim,
)

HEADER = "Idempotency-Key"
GRACE_S = 10
_LARGEST_BODY = 64 * 1024
"""Bytes of an answer that are kept; a larger one is remembered without its body."""
_TRIES = 3
_ANSWERS_A_TRIM = 32
"""After how many kept answers of a project this process looks whether there are too many."""
_WELL_FORMED = re.compile(r"[\x21-\x7e]{1,255}")
_CAME_TO_NOTHING = (None, Status.CANCELLED, Status.FAILED)

Handler = Callable[..., HttpResponse]
_kept: Counter[int] = Counter()


def once(
    handler: Handler,
    caller: Caller,
    writes: bool,
    request: Request,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Answer a POST, or repeat the answer to its first sending.

    ``writes``: the handler writes objects to the database, and does nothing else. Raise
    InvalidRequestError for a bad key, or one that was sent with another request, and ConflictError
    while the first is being accepted, or when its answer is kept no longer.
    """
    claim = _new_claim(request, caller)
    answer_first = _written if writes else _made
    for _ in range(_TRIES):
        again, replaces = _repeated(request, claim)
        if again is not None:
            return again
        try:
            mine = replace(claim, replaces=replaces)
            return answer_first(mine, handler, request, *args, **kwargs)
        except KeyTaken:  # By a request at the same moment, which is committed now.
            continue
        except KeyHeld as exc:
            raise _in_progress() from exc
    raise _in_progress()


def claim_of(request: Request) -> KeyClaim | None:
    """Return what a view that generates has to write with the generation's row; None without a
    key."""
    claim: KeyClaim | None = getattr(request, "key_claim", None)
    return claim


def answered_with(claim: KeyClaim, answer: HttpResponse) -> KeyClaim:
    """Return the claim of a request that is answered at once, with its answer."""
    return replace(claim, status=answer.status_code, body=_body(answer))


def _new_claim(request: Request, caller: Caller) -> KeyClaim:
    given = request.headers[HEADER]
    if not _WELL_FORMED.fullmatch(given):
        raise InvalidRequestError(
            f"Invalid '{HEADER}': expected 1 to 255 visible ASCII characters.", param=HEADER
        )
    digest = hashlib.sha256(request.path.encode() + b"\0" + request.body).hexdigest()
    key = hashlib.sha256(given.encode()).hexdigest()
    return KeyClaim(caller.api_key_id, caller.project_id, key, digest)


def _repeated(request: Request, claim: KeyClaim) -> tuple[HttpResponse | None, int | None]:
    """Return the answer of the first sending, or None and the id of the row to be replaced."""
    replaces = None
    for known in find(claim.api_key_id, claim.key, GRACE_S):
        replaces = replaces or known.id
        if known.is_old:
            _release(claim)
            continue
        if known.request and known.request != claim.request:
            raise InvalidRequestError(
                f"This '{HEADER}' was sent with another request.",
                param=HEADER,
                code="idempotency_key_reused",
            )
        if (again := _again(request, known)) is not None:
            return again, None
    return None, replaces


def _release(claim: KeyClaim) -> None:
    """Take the key from generations that are older than a day: it is unique among them."""
    old = timezone.now() - dt.timedelta(seconds=KEPT_S)
    mine = Generation.objects.filter(api_key_id=claim.api_key_id, idempotency_key=claim.key)
    mine.filter(created_at__lt=old).update(idempotency_key="")


def _again(request: Request, known: Known) -> HttpResponse | None:
    """Return the first answer; None when that came to nothing."""
    if known.status and known.kind is not None:
        is_deleted = kind_of(known.kind).is_deleted
        if is_deleted is not None and is_deleted(known.generation_id):
            raise _expired()
    if known.generation_id and known.run_status in _CAME_TO_NOTHING:
        return None
    if known.body:
        return Response(orjson.loads(known.body), status=known.status)
    if known.status:
        raise _expired()
    return _followed(request, known)


def _followed(request: Request, known: Known) -> HttpResponse:
    """Hand the stream of the first answer over, from its beginning."""
    assert known.kind is not None
    kind = kind_of(known.kind)
    follower = hub.follow(known.generation_id, grace_s=known.grace_s)
    remake = None
    try:
        logged = attach(follower, has_ended=known.run_status == Status.COMPLETED)
        if logged is None:
            remake = kind.replay(known.generation_id) if kind.replay else None
            if remake is None:
                raise _expired()
    except BaseException:
        hub.leave(follower)
        raise
    handoff = HandOff(
        follower,
        bool(known.streamed),
        known=logged or (),
        remake=remake,
        cancels=False,
        lines=kind.lines,
    )
    return hand_off(request, handoff)


def _written(
    claim: KeyClaim, handler: Handler, request: Request, *args: Any, **kwargs: Any
) -> HttpResponse:
    """Have objects written, with the row of the request in their transaction."""
    with transaction.atomic():
        claim.write()
        response = handler(request, *args, **kwargs)
        if _is_kept(request, response):
            claim.keep_answer(response.status_code, _body(response))
        else:
            claim.withdraw()
    _count_kept(claim.project_id)
    return response


def _made(
    claim: KeyClaim, handler: Handler, request: Request, *args: Any, **kwargs: Any
) -> HttpResponse:
    """Have a request answered that generates, or that may be done twice."""
    request.key_claim = claim  # type: ignore[attr-defined]  # See ``claim_of``.
    response = handler(request, *args, **kwargs)
    has_generated = bool(outcome_of(request._request).started_id)
    if not has_generated and _is_kept(request, response):
        with suppress(KeyTaken, KeyHeld):  # The same was done, and is remembered.
            answered_with(claim, response).write()
    if isinstance(response, Response):
        _count_kept(claim.project_id)
    return response


def _is_kept(request: Request, response: HttpResponse) -> bool:
    is_final = outcome_of(request._request).wait is None
    return is_final and isinstance(response, Response) and response.status_code < 400


def _body(response: HttpResponse) -> str:
    """Return what is kept of an answer's body; empty for a large one."""
    assert isinstance(response, Response)
    body = orjson.dumps(response.data)
    return body.decode() if len(body) <= _LARGEST_BODY else ""


def _count_kept(project_id: int) -> None:
    """Note that one more answer of a project is kept, and now and then forget the oldest.

    Retention does the same once a minute, for all projects, so here it may fail.
    """
    _kept[project_id] += 1
    if _kept[project_id] >= _ANSWERS_A_TRIM:
        _kept[project_id] = 0
        with suppress(DatabaseError):
            trim(project_id)


def _in_progress() -> ConflictError:
    return ConflictError(
        "The same request is being accepted. Please try again.", code="idempotency_in_progress"
    )


def _expired() -> ConflictError:
    return ConflictError(
        "The request was answered; its answer is not kept.", code="idempotency_expired"
    )
