"""The engine that asks an OpenAI-compatible server; only ``load_engine`` imports it."""

from worker.engines.openai_upstream.engine import load

__all__ = ["load"]
