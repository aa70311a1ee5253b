"""The metrics of model servers: reading ``/metrics`` of llama.cpp and vLLM."""

from __future__ import annotations

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
"""Our names, and the servers' names for the same; the first that a page has is used."""


def read(page: str) -> dict[str, float]:
    """Return the values of a page of metrics, by our names; none if it cannot be parsed."""
    found: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    except ValueError:
        return {}
    values: dict[str, float] = {}
    for name, theirs in MEASURES.items():
        if (first := next((one for one in theirs if one in found), None)) is not None:
            values[name] = found[first]
    return values
