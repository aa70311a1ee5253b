"""The engine that asks an OpenAI-compatible server; only the engine registry imports it."""

from worker.engines.openai_upstream.engine import load

__all__ = ["load"]
