"""Approvals of calls of MCP tools: one response asks, a later request answers.

The question is an output item, and a row of ``McpApproval``. An approved call has the arguments of
the stored item, which must have the hash that the row holds, whatever the client sends along. A row
is answered once: of two requests with an answer, one runs the call. The outbox sends the questions
to endpoints; who may answer them is decided where they are answered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from django.utils import timezone

from inference_site.accounts.models import Project
from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.core.site_settings.models import site_settings
from inference_site.outbox.models import APPROVAL_EVENT, approval_endpoints, send
from responses_api.models import Item, McpApproval, ResponseStatus, StoredResponse
from responses_api.wire.objects import McpApprovalRequest, OutputItem

ItemData = dict[str, Any]
PAGE = "/admin/responses_api/storedresponse/{pk}/change/#approvals"
"""The page of the console where questions are answered. A worker does not load its routes."""
_MAX_QUESTIONS_SENT = 20
_MAX_ARGUMENTS_SENT = 1_000


@dataclass(frozen=True, slots=True)
class ApprovedCall:
    """A call that was approved; ``request_id`` is the id of the item that asked for it."""

    request_id: str
    server_label: str
    name: str
    arguments: str


def questions_in(output: Sequence[OutputItem]) -> list[McpApprovalRequest]:
    """Return the approvals that a response asks for."""
    return [item for item in output if isinstance(item, McpApprovalRequest)]


def record_questions(questions: Sequence[McpApprovalRequest]) -> None:
    """Add the rows of the approvals that a stored response asks for; its items are stored."""
    asked = {item.id: item for item in questions}
    McpApproval.objects.bulk_create(
        McpApproval(
            item=item,
            project_id=item.project_id,
            server_label=asked[item.public_id].server_label,
            name=asked[item.public_id].name,
            arguments_sha256=_hash(asked[item.public_id].arguments),
        )
        for item in Item.objects.filter(public_id__in=asked)
    )


def publish_questions(
    questions: Sequence[McpApprovalRequest],
    *,
    project_id: int,
    response_pk: int,
    response_id: str,
    tools: Sequence[Mapping[str, Any]],
) -> None:
    """Write the messages about the questions of a response, in the transaction of its end.

    One message has all of them, the first ``_MAX_QUESTIONS_SENT`` with their names. An endpoint has
    the beginnings of their arguments only if it is set to, and the site shows content.
    """
    endpoints = list(approval_endpoints(project_id))
    if not endpoints:
        return
    data = {
        "id": response_id,
        "project": Project.objects.values_list("name", flat=True).get(pk=project_id),
        "count": len(questions),
        "page": PAGE.format(pk=response_pk),
        "is_answered_in_console": not needs_credentials(tools),
    }
    shows_content = site_settings().show_content
    for has_arguments in (False, True):
        receivers = [
            one for one in endpoints if (one.with_arguments and shows_content) == has_arguments
        ]
        asked = []
        for one in questions[:_MAX_QUESTIONS_SENT]:
            question = {"id": one.id, "server_label": one.server_label, "name": one.name}
            if has_arguments:
                text = one.arguments
                is_cut = len(text) > _MAX_ARGUMENTS_SENT
                question["arguments"] = f"{text[: _MAX_ARGUMENTS_SENT - 1]}…" if is_cut else text
            asked.append(question)
        send(receivers, APPROVAL_EVENT, response_id, {**data, "approval_requests": asked})


def needs_credentials(tools: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether an answer must bring credentials: they came with the request.

    Those of a server that was named by its URL are not stored, nor whether there were any.
    """
    return any(tool.get("type") == "mcp" and tool.get("server_url") for tool in tools)


def waiting_questions(response: StoredResponse) -> list[McpApproval]:
    """Return the questions of a response that can be answered now, in order, with their items."""
    rows = McpApproval.objects.filter(item__response=response).select_related("item")
    return [
        row
        for row in rows.order_by("item__position")
        if row.answered_at is None or _may_answer_again(row, row.item.public_id)
    ]


def answers_in(new_items: Sequence[ItemData], items: Sequence[ItemData]) -> list[ItemData]:
    """Return the answers in the input of a request, but for those whose call is among the items.

    A client that keeps the history itself sends the answers of earlier turns again.
    """
    made = {item.get("approval_request_id") for item in items if item["type"] == "mcp_call"}
    answers = (item for item in new_items if item["type"] == "mcp_approval_response")
    return [one for one in answers if one.get("approval_request_id") not in made]


def questions_of(answers: Sequence[ItemData], project_id: int) -> dict[str, McpApproval]:
    """Return the stored questions of a project that are answered, by the id of their item."""
    ids = [id_ for one in answers if isinstance(id_ := one.get("approval_request_id"), str)]
    if not ids:
        return {}
    rows = McpApproval.objects.filter(project_id=project_id, item__public_id__in=ids)
    return {row.item.public_id: row for row in rows.select_related("item")}


def approved_calls(
    answers: Sequence[ItemData], server_label: str, project_id: int
) -> Iterator[ApprovedCall]:
    """Yield the calls of a server that are approved.

    Raise InvalidRequestError for an answer to a question that is not stored, or whose arguments
    have changed.
    """
    questions = questions_of(answers, project_id)
    for answer in answers:
        question = questions.get(str(answer.get("approval_request_id")))
        if question is None:
            raise _not_stored(answer)
        if not is_approved(answer) or question.server_label != server_label:
            continue
        id_, arguments = question.item.public_id, question.item.data["arguments"]
        if _hash(arguments) != question.arguments_sha256:
            raise InvalidRequestError(
                "Invalid 'input': the arguments of the approval request have changed.",
                param="input",
            )
        yield ApprovedCall(id_, question.server_label, question.name, arguments)


def _not_stored(answer: ItemData) -> InvalidRequestError:
    return InvalidRequestError(
        "Invalid 'input': no approval request with the id "
        f"{str(answer.get('approval_request_id'))[:100]!r} is stored.",
        param="input",
        code="invalid_value",
    )


def answer_questions(answers: Sequence[ItemData], project_id: int, response_id: str) -> None:
    """Record the answers of a response, in the transaction that accepts it.

    Raise InvalidRequestError for a question that was answered before, or was deleted meanwhile. It
    may be answered again if the response with the answer failed or was cancelled before it made the
    call.
    """
    questions = questions_of(answers, project_id)
    # Those of other sites are left out: no call is made for them here.
    known = ((questions.get(str(one.get("approval_request_id"))), one) for one in answers)
    pairs = [(found, answer) for found, answer in known if found is not None]
    # In one order: two responses with the same answers would wait for each other.
    for found, answer in sorted(pairs, key=lambda pair: pair[0].pk):
        row = McpApproval.objects.select_for_update().filter(pk=found.pk).first()
        if row is None:
            raise _not_stored(answer)
        if row.answered_at is not None and not _may_answer_again(row, found.item.public_id):
            raise InvalidRequestError(
                f"Invalid 'input': the approval request '{found.item.public_id}' was answered "
                f"before, by the response '{row.answered_by}'.",
                param="input",
                code="approval_already_answered",
            )
        row.approve, row.answered_by = is_approved(answer), response_id
        row.answered_at = timezone.now()
        row.save(update_fields=["approve", "answered_by", "answered_at"])


def _may_answer_again(row: McpApproval, request_id: str) -> bool:
    response = StoredResponse.objects.filter(public_id=row.answered_by).first()
    if response is None or response.status not in (
        ResponseStatus.FAILED,
        ResponseStatus.CANCELLED,
    ):
        return False
    made = Item.objects.filter(response=response, is_output=True)
    return not made.filter(data__approval_request_id=request_id).exists()


def is_approved(answer: ItemData) -> bool:
    """Return whether an answer approves the call. Raise InvalidRequestError if it does not say."""
    approve = answer.get("approve")
    if not isinstance(approve, bool):
        raise InvalidRequestError(
            "Invalid 'input': 'approve' of an mcp_approval_response must be true or false.",
            param="input",
            code="invalid_type",
        )
    return approve


def _hash(arguments: str) -> str:
    return sha256(arguments.encode()).hexdigest()
