"""ctransformers in this process: models of the GGML era."""

from worker.engines.ctransformers.engine import load

__all__ = ["load"]
