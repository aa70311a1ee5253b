"""The request of a stored response: as it can be sent again, by an operator or by a shell."""

from __future__ import annotations

import shlex
from typing import Any

from inference_site.accounts.keys import caller_of_key
from inference_site.admin_pages.bubbles import pretty
from inference_site.errors.api_errors import ConflictError
from inference_site.generations.models import Generation
from inference_site.submission.submit import submit
from responses_api.models import StoredResponse
from responses_api.request.creation import create
from responses_api.state.history import before
from responses_api.wire.request import ResponseRequest

_OF_THE_CLIENT = ("background", "stream", "stream_options")


def body_of(stored: StoredResponse) -> dict[str, Any]:
    """Return the body that the response was asked for with."""
    items = stored.items.filter(is_output=False).order_by("position")
    body = {**stored.request, "input": [item.data for item in items]}
    if stored.previous is not None:
        body["previous_response_id"] = stored.previous.public_id
    if stored.conversation is not None:
        body["conversation"] = stored.conversation.public_id
    if stored.metadata:
        body["metadata"] = stored.metadata
    return body


def curl(stored: StoredResponse, origin: str) -> str:
    """Return the request as a command for a shell; the key is in ``$API_KEY``."""
    return (
        f"curl {origin}/v1/responses \\\n"
        '  -H "Authorization: Bearer $API_KEY" \\\n'
        "  -H 'Content-Type: application/json' \\\n"
        f"  -d {shlex.quote(pretty(body_of(stored)))}"
    )


def run_again(stored: StoredResponse, request_id: str) -> str:
    """Have the same asked again, in the background, with the key it was asked with; return the id.

    It builds on the same items, but adds nothing to a conversation. Raise ApiError for what cannot
    be done, as when the key is revoked.
    """
    asked = Generation.objects.filter(public_id=stored.public_id).first()
    if asked is None:
        raise ConflictError("The usage log, which knew its key, does not have it any more.")
    caller = caller_of_key(asked.api_key_id)
    if caller is None:
        raise ConflictError("The key that it was asked with is not accepted any more.")
    body = {name: value for name, value in body_of(stored).items() if name not in _OF_THE_CLIENT}
    if body.pop("conversation", None) is not None:
        body["input"] = [item.data for item in before(stored)]
    body |= {"background": True, "store": True}
    creation = create(caller, ResponseRequest.model_validate(body))
    submit(creation.submission, request_id)
    return str(creation.response["id"])
