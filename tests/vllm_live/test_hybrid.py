"""Predictions on real vLLMs with models of several kinds of attention, under a mixed load with evictions."""

from __future__ import annotations

import os

import pytest

from tests.vllm_live.hybrid_models import make_model
from tests.vllm_live.mixed_run import KVPIN_FLAGS, MixedRun
from tests.vllm_live.vllm_world import VllmOptions, vllm_world

pytestmark = pytest.mark.live

# More by hand: HYBRID_REQUESTS=500 scripts/test-vllm -s -k hybrid
REQUESTS = int(os.environ.get("HYBRID_REQUESTS", "120"))


# The tokenizer lacks the tokens of gpt-oss's own form of chats.
@pytest.mark.parametrize(("shape", "blocks", "chats"), [("gemma3", 260, 0.7), ("gpt-oss", 120, 0.0)])
async def test_predicted_is_reported(tmp_path, tell, shape, blocks, chats):
    model = make_model(tmp_path / "model", shape)
    options = VllmOptions(blocks, model=model, flags=("--load-format", "dummy"))
    with vllm_world(tmp_path, options, servers=2, kvpin_flags=KVPIN_FLAGS) as world:
        report = await MixedRun(world, chats=chats, loras=0).play(REQUESTS)
        views = [world.engine(number) for number in range(2)]
    audits = [view["audit"] for view in views]
    checked, exact = (sum(audit[key] for audit in audits) for key in ("checked", "exact"))
    tell(*report.lines(), f"checked: {exact} of {checked}; not: {[audit['unchecked'] for audit in audits]}")
    alone, together = report.answered(alone=True), report.answered(alone=False)
    assert len(alone) > 70
    assert report.misses(alone=True) == []
    assert len(together) > 35
    # Four at once need more blocks than a server has: one may evict what another was to reuse. kvpin knows
    # which predictions may fall to that.
    assert exact == checked > 80
    assert report.evicted > 100
    assert [view["trust"] for view in views] == ["precise"] * 2
