"""What a request builds on: stored items before it, and the items it brings itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import orjson
from django.conf import settings
from django.db.models import Q, QuerySet, TextField
from django.db.models.functions import Cast

from inference_site.errors.api_errors import InvalidRequestError, NotFoundError
from inference_site.storage.postgresql import end_transaction_if_idle
from responses_api.models import ENDED, Conversation, Item, StoredResponse
from responses_api.state.history import Room, history_of, items_of
from responses_api.state.items import IdentifiedItem, ItemData, new_item, to_data
from responses_api.state.rows import row_of
from responses_api.wire.items import InputItem, ItemReference
from responses_api.wire.request import CompactRequest, ContextFields

Memory = Mapping[str, Sequence[IdentifiedItem]]
"""Histories of responses that are stored nowhere else, by their ids."""


@dataclass(frozen=True, slots=True)
class PlacedItem:
    """An item of the context, and the field of the request it came from."""

    data: ItemData
    param: str


@dataclass(frozen=True, slots=True)
class Context:
    """The items before a request, oldest first, where they come from, and those it brings."""

    new: list[IdentifiedItem]
    before: list[IdentifiedItem] = field(default_factory=list)
    previous: StoredResponse | None = None
    conversation: Conversation | None = None
    previous_response_id: str | None = None

    @property
    def is_unstored(self) -> bool:
        """Whether some of it lives in the memory of a connection only."""
        return self.previous_response_id is not None and self.previous is None

    @property
    def continues(self) -> str:
        """The response before, whose worker may still have all of this in memory."""
        if self.conversation is None:
            return self.previous_response_id or ""
        return _last(self.conversation.responses.all())

    def placed(self) -> list[PlacedItem]:
        """Return all of them, each with the field it came from."""
        field_ = "conversation" if self.conversation else "previous_response_id"
        old = [PlacedItem(item.data, field_) for item in self.before]
        return old + [PlacedItem(item.data, f"input[{i}]") for i, item in enumerate(self.new)]


def continued_by(project_id: int, body: ContextFields | CompactRequest) -> str:
    """Return the response whose context a request has; an empty text for none."""
    if isinstance(body, ContextFields) and (conversation := body.conversation_id):
        found = StoredResponse.objects.filter(conversation__project_id=project_id)
        return _last(found.filter(conversation__public_id=conversation))
    return body.previous_response_id or ""


def _last(responses: QuerySet[StoredResponse]) -> str:
    return responses.order_by("-id").values_list("public_id", flat=True).first() or ""


def resolve(
    project_id: int,
    given: Sequence[InputItem] | None,
    previous_response_id: str | None,
    conversation_id: str | None,
    room: Room,
    memory: Memory | None = None,
) -> Context:
    """Return the context, of which no more is read than there is ``room`` for.

    Raise InvalidRequestError or NotFoundError for what is not there, ContextLengthExceeded for what
    does not fit.
    """
    if previous_response_id is not None and conversation_id is not None:
        raise InvalidRequestError(
            "Mutually exclusive parameters: 'previous_response_id' and 'conversation'.",
            param="previous_response_id",
            code="mutually_exclusive_parameters",
        )
    if len(given or ()) > room.bound.items and not room.may_cut:
        raise room.bound.exceeded(0, len(given or ()), "input")
    new = new_items(project_id, given or ())
    if not new and previous_response_id is None and conversation_id is None:
        raise InvalidRequestError(
            "Missing required parameter: 'input'.", param="input", code="missing_required_parameter"
        )
    if conversation_id is not None:
        conversation = find_conversation(project_id, conversation_id, "conversation")
        return Context(new, items_of(conversation, room), conversation=conversation)
    if previous_response_id is None:
        return Context(new)
    if memory is not None and previous_response_id in memory:
        before = _in_memory(memory[previous_response_id], room)
        return Context(new, before, previous_response_id=previous_response_id)
    previous = _find_previous(project_id, previous_response_id)
    before = history_of(previous, room)
    return Context(new, before, previous, previous_response_id=previous_response_id)


def _in_memory(items: Sequence[IdentifiedItem], room: Room) -> list[IdentifiedItem]:
    return room.fill(lambda most: items[: -most - 1 : -1], lambda most: items[:most], lambda i: i)


def find_conversation(
    project_id: int, public_id: str, param: str | None = None, *, lock: bool = False
) -> Conversation:
    """Return a conversation of the project. Raise NotFoundError, or InvalidRequestError for an id
    that can be none."""
    if not public_id.startswith("conv_"):
        raise InvalidRequestError(
            f"Invalid '{param or 'conversation_id'}': {public_id[:100]!r}. Expected an ID that "
            "begins with 'conv'.",
            param=param or "conversation_id",
            code="invalid_value",
        )
    if lock:
        end_transaction_if_idle()
    rows = Conversation.objects.select_for_update() if lock else Conversation.objects
    found = rows.filter(project_id=project_id, public_id=public_id, deleted_at=None).first()
    if found is None:
        raise conversation_not_found(public_id, param)
    return found


def conversation_not_found(public_id: str, param: str | None = None) -> NotFoundError:
    """Return the error of a conversation that is not there, or not any more."""
    return NotFoundError(f"Conversation with id '{public_id[:100]}' not found.", param=param)


def previous_not_found(public_id: str) -> InvalidRequestError:
    """Return the error of a response to build on that is not there, or not any more."""
    return InvalidRequestError(
        f"Previous response with id '{public_id[:100]}' not found.",
        param="previous_response_id",
        code="previous_response_not_found",
    )


def find_response(project_id: int, public_id: str) -> StoredResponse:
    """Return a stored response of the project. Raise NotFoundError."""
    found = row_of(project_id, public_id)
    if found is None:
        raise NotFoundError(
            f"Response with id '{public_id[:100]}' not found.", code="response_not_found"
        )
    return found


def _find_previous(project_id: int, public_id: str) -> StoredResponse:
    if not public_id.startswith("resp_"):
        raise InvalidRequestError(
            f"Invalid 'previous_response_id': {public_id[:100]!r}. Expected an ID that begins with "
            "'resp'.",
            param="previous_response_id",
            code="invalid_value",
        )
    found = row_of(project_id, public_id)
    if found is None:
        raise previous_not_found(public_id)
    if found.status not in ENDED:
        raise InvalidRequestError(
            f"Previous response with id '{public_id[:100]}' has not ended yet.",
            param="previous_response_id",
            code="previous_response_in_progress",
        )
    return found


def new_items(project_id: int, given: Sequence[InputItem]) -> list[IdentifiedItem]:
    """Return the items of a request, each with an id of its own. Raise NotFoundError for a
    reference to an item that is not there."""
    referred = _referred(project_id, {i.id for i in given if isinstance(i, ItemReference)})
    new, copied = list[IdentifiedItem](), 0
    for item in given:
        if not isinstance(item, ItemReference):
            new.append(new_item(to_data(item)))
            continue
        if item.id not in referred:
            raise NotFoundError(
                f"Item with id '{item.id[:100]}' not found. Items are not persisted when `store` "
                "is set to false.",
                param="input",
            )
        data, size = referred[item.id]
        copied += size
        if copied > settings.MAX_BODY_BYTES:
            raise InvalidRequestError(
                "The items that 'input' refers to are too large: together they have more than "
                f"{settings.MAX_BODY_BYTES} bytes.",
                param="input",
            )
        new.append(new_item(data))
    return new


def _referred(project_id: int, ids: set[str]) -> dict[str, tuple[ItemData, int]]:
    """Return the stored items with these ids, each with its size in bytes as JSON."""
    if not ids:
        return {}
    hidden = Q(response__deleted_at__isnull=False, conversation__isnull=True)
    rows = Item.objects.filter(~hidden, project_id=project_id, public_id__in=ids)
    found, size = dict[str, tuple[ItemData, int]](), 0
    for public_id, text in rows.values_list("public_id", Cast("data", TextField())).iterator(100):
        size += len(text)
        found[public_id] = orjson.loads(text), len(text)
        if size > settings.MAX_BODY_BYTES:
            break  # Each of them is copied at least once, which is refused.
    return found
