"""llama.cpp in this process, through ``xllamacpp``: the default engine."""

from worker.engines.llama_cpp.engine import load

OPTIONS = frozenset({"chat_template_kwargs", "prompt_cache_mib"})
CAPABILITIES = frozenset({"chat_template", "choices", "grammar", "logprobs", "tools"})

__all__ = ["CAPABILITIES", "OPTIONS", "load"]
