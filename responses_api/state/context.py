"""What a request builds on: stored items before it, and the items it brings itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from django.db.models import Q

from inference_site.errors.api_errors import InvalidRequestError, NotFoundError
from inference_site.storage.connections import end_if_still
from responses_api.models import ENDED, Conversation, Item, StoredResponse
from responses_api.state.history import history_of, items_of
from responses_api.state.items import IdentifiedItem, ItemData, new_item, to_data
from responses_api.state.rows import row_of
from responses_api.wire.items import InputItem, ItemReference

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
        last = self.conversation.responses.order_by("-id").values_list("public_id", flat=True)
        return last.first() or ""

    def placed(self) -> list[PlacedItem]:
        """Return all of them, each with the field it came from."""
        field_ = "conversation" if self.conversation else "previous_response_id"
        old = [PlacedItem(item.data, field_) for item in self.before]
        return old + [PlacedItem(item.data, f"input[{i}]") for i, item in enumerate(self.new)]


def resolve(
    project_id: int,
    given: Sequence[InputItem] | None,
    previous_response_id: str | None,
    conversation_id: str | None,
    memory: Memory | None = None,
) -> Context:
    """Return the context. Raise InvalidRequestError or NotFoundError for what is not there."""
    if previous_response_id is not None and conversation_id is not None:
        raise InvalidRequestError(
            "Mutually exclusive parameters: 'previous_response_id' and 'conversation'.",
            param="previous_response_id",
            code="mutually_exclusive_parameters",
        )
    new = new_items(project_id, given or ())
    if not new and previous_response_id is None and conversation_id is None:
        raise InvalidRequestError(
            "Missing required parameter: 'input'.", param="input", code="missing_required_parameter"
        )
    if conversation_id is not None:
        conversation = find_conversation(project_id, conversation_id, "conversation")
        return Context(new, items_of(conversation), conversation=conversation)
    if previous_response_id is None:
        return Context(new)
    if memory is not None and previous_response_id in memory:
        before = list(memory[previous_response_id])
        return Context(new, before, previous_response_id=previous_response_id)
    previous = _find_previous(project_id, previous_response_id)
    return Context(new, history_of(previous), previous, previous_response_id=previous_response_id)


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
        end_if_still()
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
    return [new_item(_data(project_id, item)) for item in given]


def _data(project_id: int, item: InputItem) -> ItemData:
    if not isinstance(item, ItemReference):
        return to_data(item)
    hidden = Q(response__deleted_at__isnull=False, conversation__isnull=True)
    found = Item.objects.filter(~hidden, project_id=project_id, public_id=item.id).first()
    if found is None:
        raise NotFoundError(
            f"Item with id '{item.id[:100]}' not found. Items are not persisted when `store` is "
            "set to false.",
            param="input",
        )
    data: ItemData = found.data
    return data
