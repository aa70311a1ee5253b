"""What a model's server tells of itself on its ``/metrics``: llama.cpp's and vLLM's."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

MEASURES = {
    "requests_running": ("llamacpp:requests_processing", "vllm:num_requests_running"),
    "requests_waiting": ("llamacpp:requests_deferred", "vllm:num_requests_waiting"),
    "kv_cache_used_ratio": (
        *("llamacpp:kv_cache_usage_ratio", "vllm:kv_cache_usage_perc"),
        "vllm:gpu_cache_usage_perc",
    ),
    "prompt_tokens_total": ("llamacpp:prompt_tokens_total", "vllm:prompt_tokens_total"),
    "prompt_tokens_cached_total": (
        *("llamacpp:prompt_tokens_cached_total", "vllm:prefix_cache_hits_total"),
    ),
    "tokens_total": ("llamacpp:tokens_predicted_total", "vllm:generation_tokens_total"),
    "draft_tokens_total": (
        *("llamacpp:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_draft_tokens_total"),
    ),
    "draft_tokens_accepted_total": (
        "llamacpp:spec_decode_num_accepted_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
    ),
}
"""Our names of what is read, and the servers' names, of which the first that is there counts."""


def read(page: str) -> dict[str, float]:
    """Return what a page of metrics tells; nothing of a page that is none."""
    found: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    except ValueError:
        return {}
    return {name: value for name in MEASURES if (value := _first(found, name)) is not None}


def _first(found: Mapping[str, float], name: str) -> float | None:
    return next((found[theirs] for theirs in MEASURES[name] if theirs in found), None)
