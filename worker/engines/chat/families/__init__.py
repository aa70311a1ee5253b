"""Built-in chat templates for model files without one; only ``worker.engines`` imports it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models that were trained on one format.

    ``stop`` are the texts that end a turn, for models whose tokenizer does not know them as ends.
    ``tool_format`` is how the family writes calls, empty if it has none of its own.
    """

    name: str
    stop: tuple[str, ...]
    tool_format: str = ""

    @property
    def template(self) -> str:
        """The text of the template."""
        return (_FOLDER / f"{self.name}.jinja").read_text(encoding="utf-8")


FAMILIES = {
    family.name: family
    for family in (
        Family("chatml", ("<|im_end|>", "<|im_start|>"), "hermes"),
        Family("gemma", ("<end_of_turn>", "<start_of_turn>")),
        Family("llama3", ("<|eot_id|>", "<|start_header_id|>"), "llama3_json"),
        Family("mistral", ("[INST]",), "mistral"),
        Family("phi3", ("<|end|>", "<|user|>")),
        Family("zephyr", ("<|user|>", "<|system|>")),
    )
}
