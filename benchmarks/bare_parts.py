"""Processes of ``benchmarks.floor``: Daphne and a Celery worker without the product."""

import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

from celery import Celery

from benchmarks.paced_upstream import MODEL, usage

TASK = "nothing"
BROKER = "FLOOR_BROKER"
"""The variable that names the worker's broker."""
_CHOICE = {"index": 0, "message": {"role": "assistant", "content": " token"}}
_ANSWER = json.dumps(
    {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [{**_CHOICE, "finish_reason": "stop"}],
        "usage": usage(1),
    }
).encode()
_HEADERS = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(_ANSWER))]

app = Celery("floor", broker=os.environ.get(BROKER), fixups=[])
app.conf.update(task_ignore_result=True, worker_enable_remote_control=False)


@app.task(name=TASK)
def nothing() -> None:
    """Do nothing."""


async def answer(
    scope: dict[str, Any],
    receive: Callable[[], Awaitable[dict[str, Any]]],
    send: Callable[[dict[str, Any]], Awaitable[None]],
) -> None:
    """Read a request and answer with a chat completion: an ASGI application."""
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
    await send({"type": "http.response.body", "body": _ANSWER})
