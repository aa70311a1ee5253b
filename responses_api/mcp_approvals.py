"""Approvals of calls of MCP tools: one response asks, a later request answers.

The question is an output item, and a row of ``McpApproval``. An approved call has the arguments of
the stored item, which must have the hash that the row holds, whatever the client sends along. A row
is answered once: of two requests with an answer, one runs the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from django.utils import timezone

from inference_site.core.errors.api_errors import InvalidRequestError
from responses_api.models import Item, McpApproval, ResponseStatus, StoredResponse
from responses_api.wire.objects import McpApprovalRequest, OutputItem

ItemData = dict[str, Any]
_ANSWER = "mcp_approval_response"


@dataclass(frozen=True, slots=True)
class ApprovedCall:
    """A call that was approved; ``request_id`` is the id of the item that asked for it."""

    request_id: str
    server_label: str
    name: str
    arguments: str


def record_questions(output: Sequence[OutputItem]) -> None:
    """Add the rows of the approvals that a stored response asks for; its items are stored."""
    asked = {item.id: item for item in output if isinstance(item, McpApprovalRequest)}
    if not asked:
        return
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


def approved_calls(
    new_items: Sequence[ItemData], server_label: str, project_id: int
) -> Iterator[ApprovedCall]:
    """Yield the calls of a server that the input of a request approves.

    Raise InvalidRequestError for an answer to a question that is not stored.
    """
    for answer in new_items:
        if answer["type"] == _ANSWER and _is_approved(answer):
            approval = _find(answer, project_id)
            if approval.server_label == server_label:
                yield _call(approval)


def answer_questions(new_items: Sequence[ItemData], project_id: int, response_id: str) -> None:
    """Record the answers in the input of a response, in the transaction that accepts it.

    Raise InvalidRequestError for a question that was answered before. It may be answered again if
    the response with the answer failed or was cancelled before it made the call.
    """
    for answer in new_items:
        if answer["type"] != _ANSWER:
            continue
        found = _find(answer, project_id)
        row = McpApproval.objects.select_for_update().get(pk=found.pk)
        if row.answered_at is not None and not _may_answer_again(row, found.item.public_id):
            raise InvalidRequestError(
                f"Invalid 'input': the approval request '{found.item.public_id}' was answered "
                f"before, by the response '{row.answered_by}'.",
                param="input",
                code="approval_already_answered",
            )
        row.approve, row.answered_by = _is_approved(answer), response_id
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


def _is_approved(answer: ItemData) -> bool:
    approve = answer.get("approve")
    if not isinstance(approve, bool):
        raise InvalidRequestError(
            "Invalid 'input': 'approve' of an mcp_approval_response must be true or false.",
            param="input",
            code="invalid_type",
        )
    return approve


def _find(answer: ItemData, project_id: int) -> McpApproval:
    """Return the row of the question. Raise InvalidRequestError if the project has none."""
    id_ = answer.get("approval_request_id")
    rows = McpApproval.objects.filter(project_id=project_id).select_related("item")
    found = rows.filter(item__public_id=id_).first() if isinstance(id_, str) else None
    if found is None:
        raise InvalidRequestError(
            f"Invalid 'input': no approval request with the id {str(id_)[:100]!r} is stored.",
            param="input",
            code="invalid_value",
        )
    return found


def _call(approval: McpApproval) -> ApprovedCall:
    data = approval.item.data
    if _hash(data["arguments"]) != approval.arguments_sha256:
        raise InvalidRequestError(
            "Invalid 'input': the arguments of the approval request have changed.", param="input"
        )
    return ApprovedCall(
        approval.item.public_id, approval.server_label, approval.name, data["arguments"]
    )


def _hash(arguments: str) -> str:
    return sha256(arguments.encode()).hexdigest()
