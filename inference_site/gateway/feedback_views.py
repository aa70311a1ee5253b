"""The API of feedback: the path ``/feedback`` below each stored answer."""

from __future__ import annotations

from typing import Annotated, Generic, Literal

from pydantic import Field
from rest_framework.request import Request
from rest_framework.response import Response

from inference_site.gateway.api.authentication import caller_of
from inference_site.gateway.api.payload import WireObject, WireRequest
from inference_site.gateway.api.schema import ListObject, documented
from inference_site.gateway.api.views import ApiView
from inference_site.gateway.feedback import (
    CLIENTS,
    LONGEST_NOTE,
    AnswerT,
    Rating,
    give,
    withdraw,
)


class FeedbackRequest(WireRequest):
    """The body of a request to give feedback."""

    rating: Literal["up", "down"]
    note: Annotated[str, Field(max_length=LONGEST_NOTE)] = ""


class FeedbackEntry(WireObject):
    """The feedback of one author as it is stored."""

    author: str
    rating: Literal["up", "down"]
    note: str
    created_at: int


class Feedback(FeedbackEntry):
    """The feedback of one author on a stored answer."""

    object: Literal["feedback"] = "feedback"
    answer_id: str


class DeletedFeedback(WireObject):
    """The answer to the deletion of feedback."""

    object: Literal["feedback.deleted"] = "feedback.deleted"
    answer_id: str
    deleted: bool


class FeedbackView(ApiView, Generic[AnswerT]):
    """The path ``/feedback`` below a stored answer, whose id is the only parameter of the path."""

    counts_writes = True

    def find(self, project_id: int, answer_id: str) -> AnswerT:
        """Return a stored answer of the project. Raise NotFoundError."""
        raise NotImplementedError

    def _found(self, request: Request, ids: dict[str, str]) -> tuple[str, AnswerT]:
        (answer_id,) = ids.values()
        return answer_id, self.find(caller_of(request).project_id, answer_id)

    @documented(body=FeedbackRequest, answer=Feedback)
    def post(self, request: Request, **ids: str) -> Response:
        """Rate a stored answer; an earlier rating by clients is replaced."""
        answer_id, answer = self._found(request, ids)
        body = self.parse(FeedbackRequest, request.data)
        entry = give(answer, CLIENTS, Rating(body.rating), body.note)
        return Response(Feedback(answer_id=answer_id, **entry).model_dump())

    @documented(answer=ListObject[Feedback])
    def get(self, request: Request, **ids: str) -> Response:
        """List the feedback on a stored answer, oldest first, also that of users of the console."""
        answer_id, answer = self._found(request, ids)
        entries = [Feedback(answer_id=answer_id, **entry) for entry in answer.feedback]
        page = ListObject[Feedback](data=entries, first_id=None, last_id=None, has_more=False)
        return Response(page.model_dump())

    @documented(answer=DeletedFeedback)
    def delete(self, request: Request, **ids: str) -> Response:
        """Delete the feedback that clients gave on a stored answer."""
        answer_id, answer = self._found(request, ids)
        deleted = withdraw(answer, CLIENTS)
        return Response(DeletedFeedback(answer_id=answer_id, deleted=deleted).model_dump())
