"""``Idempotency-Key``: a POST that is sent again gets the first answer, and runs once.

Each API key has its own idempotency keys, which are good for a day. A ``KeyedRequest`` keeps the
digest of the request, and either its answer or the generation whose stream is the answer. The
stream is read again from the event log, as long as that is kept (``EVENT_LOG_TTL_S``), or rebuilt
from the database; a response that was deleted is not answered. A request that was refused, failed
or cancelled is not kept: sent again, it is a new one. An answer with a secret is not kept either:
sent again, its request is a conflict. A generation goes on for ``GRACE_S`` after its client has
left, so that the client can send the request again.

When the row is written depends on what the request does. One that generates: in the transaction of
the generation's row (``submission.submit``). One that writes objects: before them, in their
transaction. One that stores a file: in the transaction from which on it can be read. Others, such
as a cancel, do no harm when they are done twice: after the answer.
"""

from __future__ import annotations

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
from rest_framework.request import Request
from rest_framework.response import Response

from inference_site.accounts.keys import Caller
from inference_site.core.errors.api_errors import ConflictError, InvalidRequestError
from inference_site.gateway.bodies import FormDigest, boundary_of
from inference_site.gateway.handoff import HandOff, hand_off, outcome_of
from inference_site.gateway.hub import hub
from inference_site.gateway.idempotency.models import (
    KeyClaim,
    KeyLocked,
    KeyTaken,
    KeyUse,
    find_use,
    trim_answers,
)
from inference_site.runs.kinds import kind_of
from inference_site.runs.models import Status

HEADER = "Idempotency-Key"
GRACE_S = 10
_LARGEST_BODY = 64 * 1024
"""Bytes of an answer whose body is kept."""
_TRIES = 3
_ANSWERS_A_TRIM = 32
"""The process trims the answers of a project after it has stored this many of them."""
_WELL_FORMED = re.compile(r"[\x21-\x7e]{1,255}")
_NOT_ANSWERED = (None, Status.CANCELLED, Status.FAILED)

Handler = Callable[..., HttpResponse]


class AnswerWithSecret(Response):
    """An answer that is not kept: its secret would be in the database in plain text."""


_kept: Counter[int] = Counter()


def answer_once(
    handler: Handler,
    caller: Caller,
    writes: bool,
    request: Request,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Answer a POST with a key, or repeat its first answer.

    ``writes``: the handler writes objects to the database, and does nothing else. Raise
    InvalidRequestError for a malformed key or one that was sent with another request, and
    ConflictError while the first is being accepted or when its answer is kept no longer.
    """
    given = request.headers[HEADER]
    if not _WELL_FORMED.fullmatch(given):
        raise InvalidRequestError(
            f"Invalid '{HEADER}': expected 1 to 255 visible ASCII characters.", param=HEADER
        )
    digest = hashlib.sha256(request.path.encode() + b"\0" + _content(request)).hexdigest()
    key = hashlib.sha256(given.encode()).hexdigest()
    claim = KeyClaim(caller.api_key_id, caller.project_id, key, digest)
    handle = _write_objects if writes else _handle
    for _ in range(_TRIES):
        if (use := find_use(claim.api_key_id, claim.key)) is not None:
            if use.request != claim.request:
                raise InvalidRequestError(
                    f"This '{HEADER}' was sent with another request.",
                    param=HEADER,
                    code="idempotency_key_reused",
                )
            if (answer := _first_answer(request, use)) is not None:
                if use.model is not None:
                    answer["x-model"] = use.model
                return answer
        replaces = None if use is None else use.id
        try:
            return handle(replace(claim, replaces=replaces), handler, request, *args, **kwargs)
        except KeyTaken:  # By a request at the same moment, which is committed now.
            continue
        except KeyLocked as exc:
            raise _in_progress() from exc
    raise _in_progress()


def _content(request: Request) -> bytes:
    """Return the body, or of a form its digest, which is the same with another boundary."""
    # Only the digest of a body in a file is known; reading it here would take its memory.
    if digest := getattr(request._request, "body_sha256", ""):
        return str(digest).encode()
    if not (boundary := boundary_of(request.content_type)):
        return bytes(request.body)
    form = FormDigest(boundary)
    form.update(request.body)
    return form.hexdigest().encode()


def claim_of(request: Request) -> KeyClaim | None:
    """Return the claim that a view writes with the generation's row; None without a key."""
    claim: KeyClaim | None = getattr(request, "key_claim", None)
    return claim


def answered_with(claim: KeyClaim, answer: HttpResponse) -> KeyClaim:
    """Return the claim of a request that is answered at once, with its answer."""
    return replace(claim, status=answer.status_code, body=_body(answer))


def _first_answer(request: Request, use: KeyUse) -> HttpResponse | None:
    """Return the answer to the first request, or hand its stream off from the beginning.

    Return None when it failed or was cancelled. Raise ConflictError when the answer is gone.
    """
    if use.status and use.kind is not None:
        is_deleted = kind_of(use.kind).is_deleted
        if is_deleted is not None and is_deleted(use.generation_id):
            raise _expired()
    if use.generation_id and use.run_status in _NOT_ANSWERED:
        return None
    if use.body:
        return Response(orjson.loads(use.body), status=use.status)
    if use.status:
        raise _expired()
    assert use.kind is not None
    has_ended = use.run_status == Status.COMPLETED
    follower = hub.resume(use.generation_id, use.kind, grace_s=use.grace_s, has_ended=has_ended)
    if follower is None:
        raise _expired()
    kind = kind_of(use.kind)
    handoff = HandOff(follower, bool(use.streamed), cancels=False, form=kind.form, ping=kind.ping)
    return hand_off(request, handoff)


def _write_objects(
    claim: KeyClaim, handler: Handler, request: Request, *args: Any, **kwargs: Any
) -> HttpResponse:
    """Call a handler that writes objects, with the row of the request in their transaction."""
    with transaction.atomic():
        claim.write()
        response = handler(request, *args, **kwargs)
        if _is_kept(request, response):
            claim.keep_answer(response.status_code, _body(response))
        else:
            claim.withdraw()
    _count_kept(claim.project_id)
    return response


def _handle(
    claim: KeyClaim, handler: Handler, request: Request, *args: Any, **kwargs: Any
) -> HttpResponse:
    """Call a handler that generates, or that does no harm when it is called twice."""
    request.key_claim = claim  # type: ignore[attr-defined]  # See ``claim_of``.
    response = handler(request, *args, **kwargs)
    has_generated = bool(outcome_of(request._request).started_id)
    if not has_generated and _is_kept(request, response):
        with suppress(KeyTaken, KeyLocked):  # The same request was answered, and is kept.
            answered_with(claim, response).write()
    if isinstance(response, Response):
        _count_kept(claim.project_id)
    return response


def _is_kept(request: Request, response: HttpResponse) -> bool:
    is_final = outcome_of(request._request).wait is None
    return is_final and isinstance(response, Response) and response.status_code < 400


def _body(response: HttpResponse) -> str:
    """Return the body of an answer; "" for one that is too large to keep, or has a secret."""
    assert isinstance(response, Response)
    if isinstance(response, AnswerWithSecret):
        return ""
    body = orjson.dumps(response.data)
    return body.decode() if len(body) <= _LARGEST_BODY else ""


def _count_kept(project_id: int) -> None:
    """Count a kept answer of a project, and trim its answers now and then.

    Retention trims those of all projects once a minute, so here it may fail.
    """
    _kept[project_id] += 1
    if _kept[project_id] >= _ANSWERS_A_TRIM:
        _kept[project_id] = 0
        with suppress(DatabaseError):
            trim_answers(project_id)


def _in_progress() -> ConflictError:
    return ConflictError(
        "The same request is being accepted. Please try again.", code="idempotency_in_progress"
    )


def _expired() -> ConflictError:
    return ConflictError(
        "The request was answered; its answer is not kept.", code="idempotency_expired"
    )
