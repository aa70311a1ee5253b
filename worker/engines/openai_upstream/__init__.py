"""Any OpenAI-compatible server as the engine of a model."""

from worker.engines.openai_upstream.engine import load
from worker.engines.openai_upstream.options import OPTIONS, capabilities

__all__ = ["OPTIONS", "capabilities", "load"]
