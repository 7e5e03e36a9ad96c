"""Prometheus text, read by Prometheus's own parser."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from engine_adapter.torch_engine.engine import Counters
from engine_adapter.torch_engine.metrics import EngineMetrics

STATS = {
    "gpu": {"total": 8, "free": 5, "cached": 2, "active": 1},
    "host": {"total": 4, "free": 4, "cached": 0, "bytes": 64},
    "pinned_blocks": 3,
    "blocks": {"evicted": 1, "offloaded": 2, "restored": 0},
}


def samples(text: bytes) -> dict[tuple, float]:
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_counters_and_gauges():
    metrics = EngineMetrics()
    metrics.first_token_seconds.observe(0.02)
    counters = Counters(
        steps=9, prompt_tokens=100, cached_tokens=40, generated_tokens=7, running=2, waiting=1
    )
    counters.finished["stop"] = 5
    found = samples(metrics.render(counters, STATS))
    assert found["kvpin_engine_steps_total",] == 9
    assert found["kvpin_engine_cached_tokens_total",] == 40
    assert found["kvpin_engine_requests_running",] == 2
    assert found["kvpin_engine_requests_finished_total", ("reason", "stop")] == 5
    assert found["kvpin_engine_kv_blocks", ("state", "free"), ("tier", "gpu")] == 5
    assert found["kvpin_engine_kv_blocks", ("state", "cached"), ("tier", "host")] == 0
    assert found["kvpin_engine_kv_blocks_moved_total", ("what", "offloaded")] == 2
    assert found["kvpin_engine_kv_pinned_blocks",] == 3
    assert found["kvpin_engine_first_token_seconds_count",] == 1
    assert all(name.startswith("kvpin_engine_") for name, *_ in found)
