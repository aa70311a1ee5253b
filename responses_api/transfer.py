"""Export and import of responses, conversations with their items, and prompt templates.

Sealed content of items is unsealed for the export and sealed again at the import, because the other
site has another key and the project another id there.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from django.db import connection, transaction
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.core.storage.cipher import seal, unseal
from inference_site.core.transfer import Id, ObjectLine, Refused, known_ids
from inference_site.gateway.feedback_views import FeedbackEntry
from responses_api.events import error_event
from responses_api.items import split_sealed
from responses_api.models import (
    ENDED,
    LONGEST_PROMPT,
    Conversation,
    Item,
    McpApproval,
    PromptTemplate,
    PromptVersion,
    ResponseStatus,
    StoredResponse,
)
from responses_api.stored_responses import stored_response

logger = logging.getLogger(__name__)

_BATCH = 200
_SNAPSHOT = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"
_NEW_KEYS = """
SELECT nextval(pg_get_serial_sequence('responses_api_storedresponse', 'id'))
FROM generate_series(1, %s)
"""
Position = Annotated[int, Field(ge=0, le=2**31 - 1)]
_MOST_EVENTS = 2**21
"""More than the attempts of one response send. A stream that is read again has a line for each
number before its last event."""
EventNumber = Annotated[int, Field(ge=0, le=_MOST_EVENTS)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ApprovalPart(_Part):
    """The approval of a call of an MCP tool that an item asks for."""

    server_label: Annotated[str, Field(max_length=64)]
    name: Annotated[str, Field(max_length=128)]
    arguments_sha256: Annotated[str, Field(max_length=64)]
    asked_at: AwareDatetime
    approve: bool | None
    answered_by: Annotated[str, Field(max_length=64)]
    answered_at: AwareDatetime | None


class ItemPart(_Part):
    """An item. ``unsealed`` is the text of its sealed content, of which ``data`` has the prefix."""

    id: Id
    position: Position
    is_output: bool
    conversation_position: Position | None
    data: dict[str, Any]
    unsealed: str | None = None
    approval: ApprovalPart | None = None


class SentDeltasPart(_Part):
    """The fields of ``SentDeltas``: how the text of an item was divided into events."""

    first: EventNumber | None
    sizes: list[Position]
    logprob_counts: list[Position]


class DeltasPart(_Part):
    """The value of ``StoredResponse.deltas``: ``end`` is the number of the last event."""

    end: EventNumber | None
    items: list[SentDeltasPart | None]


class ConversationLine(ObjectLine):
    """A conversation, without its items."""

    kind: Literal["conversation"] = "conversation"
    metadata: dict[str, Any]
    next_position: Position
    created_at: AwareDatetime
    deleted_at: AwareDatetime | None


class ConversationItemLine(ObjectLine):
    """An item that was added to a conversation by itself, and not by a response."""

    kind: Literal["conversation_item"] = "conversation_item"
    conversation: Id
    item: ItemPart


class ResponseLine(ObjectLine):
    """A response that has ended, with its items.

    ``deleted_at`` is set of a deleted one that others build on.
    """

    kind: Literal["response"] = "response"
    model: Annotated[str, Field(max_length=200)]
    status: Literal[
        ResponseStatus.COMPLETED,
        ResponseStatus.INCOMPLETE,
        ResponseStatus.FAILED,
        ResponseStatus.CANCELLED,
    ]
    background: bool
    previous: Id | None
    conversation: Id | None
    conversation_position: Position | None
    metadata: dict[str, Any]
    request: dict[str, Any]
    usage: dict[str, Any] | None
    deltas: DeltasPart | None
    error: dict[str, Any] | None
    moderation: dict[str, Any] | None = None
    incomplete_reason: Annotated[str, Field(max_length=32)]
    created_at: AwareDatetime
    completed_at: AwareDatetime | None
    deleted_at: AwareDatetime | None
    rating: Literal["", "up", "down"] = ""
    feedback: list[FeedbackEntry] = []
    items: list[ItemPart]


class PromptVersionPart(_Part):
    """One version of a prompt template."""

    number: Annotated[int, Field(ge=1, le=2**31 - 1)]
    developer_message: Annotated[str, Field(max_length=LONGEST_PROMPT)]
    user_message: Annotated[str, Field(max_length=LONGEST_PROMPT)]
    model: Annotated[str, Field(max_length=200)]
    created_at: AwareDatetime


class PromptLine(ObjectLine):
    """A prompt template with its versions."""

    kind: Literal["prompt"] = "prompt"
    name: Annotated[str, Field(min_length=1, max_length=100)]
    default_version: Annotated[int, Field(ge=1, le=2**31 - 1)] | None
    created_at: AwareDatetime
    versions: list[PromptVersionPart]


LINES: dict[str, type[ObjectLine]] = {
    "prompt": PromptLine,
    "conversation": ConversationLine,
    "conversation_item": ConversationItemLine,
    "response": ResponseLine,
}
_CONVERSATION = ("metadata", "next_position", "created_at", "deleted_at")
_RESPONSE = tuple(
    ResponseLine.model_fields.keys()
    - {"kind", "id", "previous", "conversation", "deltas", "feedback", "items"}
)
_PROMPT = ("name", "default_version", "created_at")
_VERSION = tuple(PromptVersionPart.model_fields)
_APPROVAL = tuple(ApprovalPart.model_fields)


def export_lines(project_id: int, folder: Path) -> Iterator[ObjectLine]:
    """Yield prompts, conversations, their items, and responses, as they are at one moment.

    See ``inference_site.core.transfer.Transfer``. Responses that have not ended are left out.
    """
    del folder
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute(_SNAPSHOT)
        prompts = PromptTemplate.objects.filter(project=project_id).order_by("pk")
        for prompt in prompts.prefetch_related("versions").iterator(_BATCH):
            versions = sorted(prompt.versions.all(), key=lambda version: version.number)
            yield PromptLine(
                id=prompt.public_id,
                **{name: getattr(prompt, name) for name in _PROMPT},
                versions=[
                    PromptVersionPart(**{name: getattr(version, name) for name in _VERSION})
                    for version in versions
                ],
            )
        conversations = Conversation.objects.filter(project=project_id).order_by("pk")
        for conversation in conversations.iterator(_BATCH):
            columns = {name: getattr(conversation, name) for name in _CONVERSATION}
            yield ConversationLine(id=conversation.public_id, **columns)
        own = Item.objects.filter(conversation__project=project_id, response=None)
        own = own.select_related("conversation", "approval")
        for item in own.order_by("conversation", "conversation_position").iterator(_BATCH):
            assert item.conversation is not None
            part, public_id = _part(item, project_id), item.conversation.public_id
            yield ConversationItemLine(id=item.public_id, conversation=public_id, item=part)
        responses = StoredResponse.objects.filter(project=project_id, status__in=ENDED)
        responses = responses.select_related("previous", "conversation").order_by("pk")
        rows = responses.iterator(_BATCH)
        while some := list(islice(rows, _BATCH)):
            yield from _responses(some, project_id)


def _responses(rows: Sequence[StoredResponse], project_id: int) -> Iterator[ResponseLine]:
    items: dict[int, list[ItemPart]] = defaultdict(list)
    found = Item.objects.filter(response__in=rows).select_related("approval")
    for item in found.order_by("response", "position"):
        assert item.response_id is not None
        items[item.response_id].append(_part(item, project_id))
    for row in rows:
        yield ResponseLine(
            id=row.public_id,
            previous=row.previous and row.previous.public_id,
            conversation=row.conversation and row.conversation.public_id,
            items=items[row.pk],
            **{name: getattr(row, name) for name in _RESPONSE},
            deltas=row.deltas,
            feedback=row.feedback,
        )


def _part(item: Item, project_id: int) -> ItemPart:
    data: dict[str, Any] = item.data
    text = None
    sealed = data.get("encrypted_content")
    if isinstance(sealed, str) and sealed:
        prefix, sealed = split_sealed(sealed)
        data = {**data, "encrypted_content": prefix}
        try:
            text = unseal(sealed, project_id, "encrypted_content")
        except InvalidRequestError:  # The site's key has changed.
            logger.warning("item %s: its encrypted content cannot be read", item.public_id)
    approval = getattr(item, "approval", None)  # Of the other end of the relation, if there is one.
    return ItemPart(
        id=item.public_id,
        position=item.position,
        is_output=item.is_output,
        conversation_position=item.conversation_position,
        data=data,
        unsealed=text,
        approval=approval and ApprovalPart(**{name: getattr(approval, name) for name in _APPROVAL}),
    )


def _item(project_id: int, part: ItemPart, **owner: Any) -> Item:
    data = part.data
    if part.unsealed is not None:
        sealed = seal(part.unsealed, project_id)
        data = {**data, "encrypted_content": f"{data.get('encrypted_content') or ''}{sealed}"}
    return Item(
        public_id=part.id,
        project_id=project_id,
        position=part.position,
        is_output=part.is_output,
        conversation_position=part.conversation_position,
        data=data,
        **owner,
    )


@transaction.atomic
def import_lines(project_id: int, kind: str, lines: Sequence[ObjectLine], folder: Path) -> int:
    """Store prompts, conversations, items or responses.

    See ``inference_site.core.transfer.Transfer``.
    """
    del folder
    ids = [line.id for line in lines]
    match kind:
        case "prompt":
            known = known_ids(PromptTemplate, project_id, ids)
            return _import_prompts(project_id, cast(list[PromptLine], lines), known)
        case "conversation":
            known = known_ids(Conversation, project_id, ids)
            return _import_conversations(project_id, cast(list[ConversationLine], lines), known)
        case "conversation_item":
            known = known_ids(Item, project_id, ids)
            new_items = [line for line in lines if line.id not in known]
            return _import_conversation_items(
                project_id, cast(list[ConversationItemLine], new_items)
            )
    known = known_ids(StoredResponse, project_id, ids)
    new = [line for line in lines if line.id not in known]
    return _import_responses(project_id, cast(list[ResponseLine], new))


def _import_prompts(project_id: int, lines: Sequence[PromptLine], known: set[str]) -> int:
    """Store prompt templates, and versions that known ones lack."""
    names = PromptTemplate.objects.filter(project=project_id).exclude(public_id__in=known)
    taken = set(names.values_list("name", flat=True))
    for line in lines:
        if line.id not in known and line.name in taken:
            reason = f"the project has another prompt template {line.name}; rename it"
            raise Refused(line.id, reason)
    PromptTemplate.objects.bulk_create(
        PromptTemplate(
            public_id=line.id,
            project_id=project_id,
            **{name: getattr(line, name) for name in _PROMPT},
        )
        for line in lines
        if line.id not in known
    )
    rows = PromptTemplate.objects.filter(public_id__in=[line.id for line in lines])
    templates = {row.public_id: row for row in rows.prefetch_related("versions")}
    for line in lines:
        template = templates[line.id]
        held = {version.number for version in template.versions.all()}
        PromptVersion.objects.bulk_create(
            PromptVersion(template=template, **{name: getattr(part, name) for name in _VERSION})
            for part in line.versions
            if part.number not in held
        )
    return len(lines) - len(known)


def _import_conversations(
    project_id: int, lines: Sequence[ConversationLine], known: set[str]
) -> int:
    new = []
    for line in lines:
        if line.id in known:  # It may have got more items since the last import.
            rows = Conversation.objects.filter(public_id=line.id)
            rows.filter(next_position__lt=line.next_position).update(
                next_position=line.next_position
            )
            continue
        columns = {name: getattr(line, name) for name in _CONVERSATION}
        new.append(Conversation(public_id=line.id, project_id=project_id, **columns))
    Conversation.objects.bulk_create(new)
    return len(new)


def _import_conversation_items(project_id: int, lines: Sequence[ConversationItemLine]) -> int:
    owners = _keys(Conversation, project_id, {line.conversation for line in lines})
    pairs = []
    for line in lines:
        if line.conversation not in owners:
            raise Refused(line.id, f"the project has no conversation {line.conversation}")
        owner = owners[line.conversation]
        pairs.append((_item(project_id, line.item, conversation_id=owner), line.item))
    _create_items(project_id, pairs)
    return len(pairs)


def _import_responses(project_id: int, lines: Sequence[ResponseLine]) -> int:
    taken = Item.objects.filter(public_id__in=[part.id for line in lines for part in line.items])
    if found := set(taken.values_list("public_id", flat=True)):
        line = next(line for line in lines if found & {part.id for part in line.items})
        raise Refused(line.id, f"an item of {line.id} is stored already, with another object")
    with connection.cursor() as cursor:
        cursor.execute(_NEW_KEYS, [len(lines)])
        new_keys = {line.id: pk for line, (pk,) in zip(lines, cursor.fetchall(), strict=True)}
    previous = {line.previous for line in lines if line.previous} - new_keys.keys()
    keys = {**_keys(StoredResponse, project_id, previous), **new_keys}
    named = {line.conversation for line in lines if line.conversation}
    conversations = _keys(Conversation, project_id, named)
    rows, pairs = [], []
    for line in lines:
        _check_readable(line)
        if line.previous and line.previous not in keys:
            raise Refused(line.id, f"the project has no response {line.previous}")
        if line.conversation and line.conversation not in conversations:
            raise Refused(line.id, f"the project has no conversation {line.conversation}")
        conversation = conversations.get(line.conversation or "")
        row = StoredResponse(
            pk=keys[line.id],
            public_id=line.id,
            project_id=project_id,
            previous_id=keys.get(line.previous or ""),
            conversation_id=conversation,
            **{name: getattr(line, name) for name in _RESPONSE},
            deltas=line.deltas and line.deltas.model_dump(),
            feedback=[entry.model_dump() for entry in line.feedback],
        )
        rows.append(row)
        for part in line.items:
            has_place = part.conversation_position is not None
            owner = {"conversation_id": conversation if has_place else None}
            pairs.append((_item(project_id, part, response_id=row.pk, **owner), part))
    StoredResponse.objects.bulk_create(rows)
    _create_items(project_id, pairs)
    return len(rows)


def _check_readable(line: ResponseLine) -> None:
    """Raise Refused for a response of which the API could not show its object or its stream."""
    if line.deleted_at is not None:  # Nobody reads it, and what is forgotten has lost its content.
        return
    columns = {name: getattr(line, name) for name in _RESPONSE}
    output = [{"id": part.id, **part.data} for part in line.items if part.is_output]
    try:
        stored_response(StoredResponse(public_id=line.id, **columns), output)
        if line.error is not None:
            error_event(line.error, count())
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise Refused(line.id, f"{line.id} cannot be read: '{where}': {first['msg']}") from exc
    except (InvalidRequestError, KeyError, TypeError) as exc:
        raise Refused(line.id, f"{line.id} cannot be read: {exc}") from exc


def _keys(
    model: type[Conversation | StoredResponse], project_id: int, ids: Collection[str]
) -> dict[str, int]:
    """Return the primary keys of the objects of the project by their ids."""
    rows = model._default_manager.filter(project=project_id, public_id__in=ids)
    return dict(rows.values_list("public_id", "pk"))


def _create_items(project_id: int, pairs: Sequence[tuple[Item, ItemPart]]) -> None:
    Item.objects.bulk_create(item for item, _ in pairs)
    McpApproval.objects.bulk_create(
        McpApproval(
            item=item,
            project_id=project_id,
            **{name: getattr(part.approval, name) for name in _APPROVAL},
        )
        for item, part in pairs
        if part.approval is not None
    )
