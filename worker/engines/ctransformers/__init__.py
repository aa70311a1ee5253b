"""The ctransformers engine, for models of the GGML era; only the engine registry imports it."""

from worker.engines.ctransformers.launch import load

__all__ = ["load"]
