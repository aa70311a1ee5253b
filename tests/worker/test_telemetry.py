"""What a model's server tells of itself: pages as llama.cpp (b9670) and vLLM (0.32) write them."""

from __future__ import annotations

import pytest

from worker.model_servers.process import read_metrics

LLAMA_CPP = """\
# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed, excluding cached tokens
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 120
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 3
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 1
"""
VLLM = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 64.0
"""


@pytest.mark.parametrize(
    ("page", "told"),
    [
        (
            LLAMA_CPP,
            {"requests_running": 3, "requests_waiting": 1, "prompt_tokens_total": 120},
        ),
        (
            VLLM,
            {"requests_running": 3, "kv_cache_used_ratio": 0.25, "prompt_tokens_cached_total": 64},
        ),
        ("", {}),
        ("<html>not metrics</html> {", {}),
        ("other_metric 5\n", {}),
    ],
)
def test_it_is_read_under_our_names(page: str, told: dict[str, float]) -> None:
    assert read_metrics(page) == told
