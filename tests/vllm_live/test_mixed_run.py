"""Predictions on real vLLMs under a mixed load with evictions, a flush and a killed engine."""

from __future__ import annotations

import pytest

from tests.vllm_live.mixed_run import KVPIN_FLAGS, OPTIONS, MixedRun
from tests.vllm_live.vllm_world import vllm_world

pytestmark = pytest.mark.live


async def test_predicted_is_reported(tmp_path, tell):
    with vllm_world(tmp_path, OPTIONS, servers=2, kvpin_flags=KVPIN_FLAGS) as world:
        report = await MixedRun(world).play(120)
    tell(*report.lines())
    alone, together = report.answered(alone=True), report.answered(alone=False)
    assert len(alone) > 70
    assert len(together) > 35
    assert report.misses(alone=True) == []
    # Four at a time: one request may have just evicted what another needs.
    assert len(report.misses(alone=False)) <= 1
    assert report.evicted > 100
    assert sum(seen.reported for seen in report.answered()) > 0
    assert {seen.stage for seen in report.seen if seen.broken} <= {"while an engine is killed"}
    assert {seen.engine for seen in report.answered()} == {"vllm-0", "vllm-1"}
