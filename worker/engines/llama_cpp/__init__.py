"""llama.cpp in this process, through ``xllamacpp``: the default engine."""

from worker.engines.llama_cpp.engine import load

__all__ = ["load"]
