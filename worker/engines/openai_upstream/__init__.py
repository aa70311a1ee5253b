"""Any OpenAI-compatible server as the engine of a model."""

from worker.engines.openai_upstream.engine import load

__all__ = ["load"]
