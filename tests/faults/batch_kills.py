"""A batch while the processes of the site are killed, and what must be true of it afterwards.

``python -m tests.faults.batch_kills [KILLS] [LINES]`` does it outside of the suite, with many more.
"""

from __future__ import annotations

import io
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, Final

from tests.e2e.scripts import script
from tests.served_stack import ServedStack, served_stack, wait_until

PROCESSES = ("beat", "worker", "web", "redis")
_URL: Final = "/v1/chat/completions"


class KilledBatch:
    """A batch of ``lines`` lines; the client tries again while the site is away."""

    def __init__(self, stack: ServedStack, lines: int, sleep_ms: int = 60) -> None:
        self._stack, self._lines = stack, lines
        self._client = stack.client().with_options(max_retries=20)
        content = io.BytesIO("\n".join(_line(n, sleep_ms) for n in range(lines)).encode())
        file = self._client.files.create(file=("lines.jsonl", content), purpose="batch")
        begun = self._client.batches.create(
            input_file_id=file.id, endpoint=_URL, completion_window="24h"
        )
        self.id = begun.id

    @property
    def completed(self) -> int:
        """How many lines are completed."""
        counts = self._client.batches.retrieve(self.id).request_counts
        return 0 if counts is None else counts.completed

    def kill(self, names: Iterable[str], lines_apart: int = 5) -> Iterator[str]:
        """Kill these processes, each after some more lines; yield the name of each."""
        for name in names:
            enough = min(self.completed + lines_apart, self._lines)
            wait_until(lambda n=enough: self.completed >= n, 300, "more lines")
            if self.completed == self._lines:
                return
            with suppress(ProcessLookupError):  # It is being started again.
                os.kill(self._stack.pid_of(name), signal.SIGKILL)
                yield name
            time.sleep(0.2)

    def check(self, timeout_s: float) -> None:
        """Raise AssertionError unless each line is answered once, by one generation."""
        ended = ("completed", "failed", "expired", "cancelled")
        wait_until(
            lambda: self._client.batches.retrieve(self.id).status in ended, timeout_s, "the batch"
        )
        batch, lines = self._client.batches.retrieve(self.id), self._lines
        assert batch.request_counts is not None
        counted = batch.request_counts.to_dict()
        wanted = {"total": lines, "completed": lines, "failed": 0}
        assert counted == wanted, f"{batch.status}: {counted}, errors: {self._errors(batch)}"
        text = self._client.files.content(batch.output_file_id or "").text
        answers: list[Any] = [json.loads(line) for line in text.splitlines()]
        counts = Counter(answer["custom_id"] for answer in answers)
        assert counts == dict.fromkeys(map(str, range(lines)), 1)
        for answer in answers:
            said = answer["response"]["body"]["choices"][0]["message"]["content"]
            assert said == f"answer {answer['custom_id']}"
        # Each answer is that of the one generation that completed for its line.
        ids = [answer["response"]["request_id"] for answer in answers]
        told = self._stack.sql(
            "SELECT count(*) FROM generations_generation WHERE public_id = ANY(%s) "
            "AND status = 'completed'",
            ids,
        )
        assert told == [(lines,)]
        number = self.id.removeprefix("batch_")
        done = self._stack.sql(
            "SELECT count(*) FROM generations_generation WHERE request_id = ANY(%s) "
            "AND status = 'completed'",
            [f"batch_req_{number}_{n}" for n in range(1, lines + 1)],
        )
        assert done == [(lines,)]

    def _errors(self, batch: Any) -> Counter[str]:
        """Count the lines of the error file by what they say."""
        if batch.error_file_id is None:
            return Counter()
        text = self._client.files.content(batch.error_file_id).text
        lines = (json.loads(line) for line in text.splitlines())
        return Counter(str(line["error"] or line["response"]["body"])[:200] for line in lines)


def _line(number: int, sleep_ms: int) -> str:
    said = script({"sleep_ms": sleep_ms}, {"text": f"answer {number}"})
    body = {"model": "scripted", "messages": [{"role": "user", "content": said}]}
    return json.dumps({"custom_id": f"{number}", "method": "POST", "url": _URL, "body": body})


def main(kills: int, lines: int) -> None:
    chance = random.Random(37)
    with served_stack() as stack:
        batch = KilledBatch(stack, lines)
        names = (chance.choice(PROCESSES) for _ in range(kills))
        killed: Counter[str] = Counter()
        for name in batch.kill(names, max(5, lines // (2 * kills))):
            killed[name] += 1
            print(f"{killed.total()} kills, {batch.completed} of {lines} lines", flush=True)
        batch.check(600 + lines / 20)
        print(f"{killed.total()} kills {dict(killed)}: each of {lines} lines is answered once")


if __name__ == "__main__":
    main(*(int(value) for value in (*sys.argv[1:], "100", "20000")[:2]))
