"""Compaction: a conversation becomes a summary, written by the model and sealed for this server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inference_site.domain.deltas import Delta, TextDelta, Usage
from inference_site.domain.messages import Message
from inference_site.domain.request import GenerationRequest
from inference_site.generations.kinds import WholeAnswerAssembler
from inference_site.streams.request_documents import Assembly
from inference_site.submission.model_access import ResolvedModel
from responses_api.output.objects import response_usage
from responses_api.output.sealing import seal
from responses_api.state.items import IdentifiedItem, ItemData, new_item

COMPACTION = "response.compaction"
"""Name of this kind of generation."""

_TASK = (
    "Summarise the conversation that follows, so that it can be continued from the summary alone. "
    "Keep names, numbers, decisions, results of tools and what is still to be done."
)
_HEAD = "Summary of the conversation so far:\n"
_MAX_TOKENS = 1024


def to_summary_request(
    instructions: str | None, items: Sequence[IdentifiedItem], model: ResolvedModel
) -> GenerationRequest:
    """Return what the engine is asked."""
    transcript = "\n".join(filter(None, (_line(item.data) for item in items)))
    may_think = "chat_template" in model.capabilities
    return GenerationRequest(
        model=model.spec.id,
        messages=(
            Message("system", f"{instructions}\n\n{_TASK}" if instructions else _TASK),
            Message("user", transcript),
        ),
        sampling=model.spec.sampling,
        max_output_tokens=min(_MAX_TOKENS, model.spec.context_length // 4),
        template_vars={"enable_thinking": False} if may_think else {},
    )


def _line(data: ItemData) -> str:
    match data:
        case {"type": "message", "role": role, "content": parts}:
            texts = (part.get("text") or part.get("refusal") or "[media]" for part in parts)
            return f"{role}: {''.join(texts)}"
        case {"type": "function_call", "name": name, "arguments": arguments}:
            return f"assistant calls {name}: {arguments}"
        case {"type": "custom_tool_call", "name": name, "input": text}:
            return f"assistant calls {name}: {text}"
        case {"output": output}:
            return f"result: {output if isinstance(output, str) else json.dumps(output)}"
        case _:
            return ""


@dataclass(frozen=True)
class CompactionAssembly(Assembly):
    """How a compaction is written; ``kept`` are the user's messages, as the API shows them."""

    response_id: str
    created_at: int
    kept: list[dict[str, Any]]
    project_id: int


class CompactionAssembler(WholeAnswerAssembler):
    """Assembles a compaction: the user's messages as they are, and the summary of the rest."""

    def __init__(self, assembly: CompactionAssembly) -> None:
        self._assembly = assembly
        self._text: list[str] = []
        self._usage = Usage()

    def feed(self, delta: Delta) -> Sequence[bytes]:
        """Take the next delta."""
        match delta:
            case TextDelta(text):
                self._text.append(text)
            case Usage():
                self._usage = delta
        return ()

    def answer(self) -> dict[str, Any]:
        """Return the object."""
        sealed = seal(_HEAD + "".join(self._text), self._assembly.project_id)
        compaction = new_item({"type": "compaction", "encrypted_content": sealed})
        return {
            "id": self._assembly.response_id,
            "object": "response.compaction",
            "created_at": self._assembly.created_at,
            "output": [*self._assembly.kept, compaction.wire()],
            "usage": response_usage(self._usage).model_dump(),
        }
