"""The trial of a chat template while its model is loaded: a busy host makes it slow, not wrong."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from inference_site.catalogue.engines.llama_cpp import LlamaCppOptions
from inference_site.core.domain.errors import GenerationFailed
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.limited_process import PATIENCE_S, LimitedProcess
from worker.engines.chat import template
from worker.engines.chat.template import ChatTemplate
from worker.engines.llama_cpp.chat import TemplateTrial


class StarvedProcess:
    """Answers just after a request would have given up."""

    def ask(self, *_: Any, patience_s: float = PATIENCE_S) -> list[str]:
        if patience_s <= PATIENCE_S:
            raise GenerationFailed
        return ["", "[]"]


def test_a_load_outlasts_a_process_that_gets_no_processor_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(template, "_shared_process", StarvedProcess())
    TemplateTrial(ModelSpec(id="m", engine="llama_cpp"), LlamaCppOptions(chat_template="chatml"))
    assert ChatTemplate("x").stop_texts == ()


def test_question_after_the_process_was_killed_is_answered() -> None:
    """The kernel kills the process of a host without memory; the question is not the cause."""
    process = LimitedProcess("worker.engines.chat.rendering")
    for number in range(2):
        assert process.ask("{{ x }}", {"x": number}) == ["", str(number)]
        assert process._process is not None
        process._process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process._process.pid, os.WEXITED | os.WNOWAIT)
    process._end()
