"""A batch while its processes are killed: each line is answered, once."""

from __future__ import annotations

import io
import json
import os
import signal
import time
from collections import Counter
from typing import Any

import openai

from tests.e2e.scripts import script
from tests.served_stack import ServedStack, wait_until

LINES = 150


def line(number: int) -> str:
    said = script({"sleep_ms": 60}, {"text": f"answer {number}"})
    body = {"model": "scripted", "messages": [{"role": "user", "content": said}]}
    url = "/v1/chat/completions"
    return json.dumps({"custom_id": f"{number}", "method": "POST", "url": url, "body": body})


def completed(client: openai.OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    return 0 if counts is None else counts.completed


def test_every_line_is_in_the_results_once_whatever_dies(stack: ServedStack) -> None:
    patient = stack.client().with_options(max_retries=20)
    content = io.BytesIO("\n".join(map(line, range(LINES))).encode())
    file = patient.files.create(file=("lines.jsonl", content), purpose="batch")
    begun = patient.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    for name in ("beat", "worker", "beat", "web", "redis"):
        so_far = completed(patient, begun.id)
        enough = min(so_far + 5, LINES)
        wait_until(lambda n=enough: completed(patient, begun.id) >= n, 90, "more lines")
        os.kill(stack.pid_of(name), signal.SIGKILL)
        time.sleep(0.2)

    def is_over() -> bool:
        return patient.batches.retrieve(begun.id).status == "completed"

    wait_until(is_over, 150, "the batch")
    batch = patient.batches.retrieve(begun.id)
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": LINES, "completed": LINES, "failed": 0}
    answers: list[Any] = [
        json.loads(text)
        for text in patient.files.content(batch.output_file_id or "").text.splitlines()
    ]
    counts = Counter(answer["custom_id"] for answer in answers)
    assert counts == dict.fromkeys(map(str, range(LINES)), 1)
    for answer in answers:
        said = answer["response"]["body"]["choices"][0]["message"]["content"]
        assert said == f"answer {answer['custom_id']}"
    # Each answer is that of the one generation that completed for its line.
    ids = [answer["response"]["request_id"] for answer in answers]
    told = stack.sql(
        "SELECT count(*) FROM generations_generation WHERE public_id = ANY(%s) "
        "AND status = 'completed'",
        ids,
    )
    assert told == [(LINES,)]
    asked = [f"batch_req_{begun.id.removeprefix('batch_')}_{n}" for n in range(1, LINES + 1)]
    done = stack.sql(
        "SELECT count(*) FROM generations_generation WHERE request_id = ANY(%s) "
        "AND status = 'completed'",
        asked,
    )
    assert done == [(LINES,)]
