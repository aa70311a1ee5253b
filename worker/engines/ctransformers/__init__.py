"""ctransformers in this process: models of the GGML era."""

from inference_site.domain.model_spec import ModelSpec
from worker.engines.chat.adapter import chat_capabilities
from worker.engines.chat.configuration import CHAT_OPTIONS
from worker.engines.ctransformers.engine import COMPLETES, load
from worker.engines.ctransformers.model_file import has_chat

OPTIONS = CHAT_OPTIONS | {"lib", "model_type"}


def capabilities(spec: ModelSpec) -> frozenset[str]:
    """Return what requests to this model may ask for: chats too, when it has a template."""
    return chat_capabilities(COMPLETES) if has_chat(spec) else COMPLETES


__all__ = ["OPTIONS", "capabilities", "load"]
