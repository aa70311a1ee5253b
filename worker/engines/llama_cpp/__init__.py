"""The llama.cpp engine, through ``xllamacpp``; only the engine registry imports it."""

from worker.engines.llama_cpp.engine import load

__all__ = ["load"]
