"""The llama.cpp engine, through ``xllamacpp``; only ``load_engine`` imports it."""

from worker.engines.llama_cpp.engine import load

__all__ = ["load"]
