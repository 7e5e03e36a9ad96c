"""Predictions on a real SGLang whose model has sliding windows, under a mixed load with evictions."""

from __future__ import annotations

import pytest

from tests.sglang_live.mixed_run import FORMS, LEFT, MixedRun
from tests.sglang_live.sglang_world import SglangOptions, sglang_world
from tests.vllm_live.hybrid_models import make_model

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]

# With n above 1, SGLang leaves no window where a prompt left another one; those predictions are not firm.
ALONE = tuple(form for form in FORMS if "n=2" not in form)


async def test_predicted_is_reported(tmp_path, tell, pytestconfig):
    """With less memory for windows than for full attention, this server ends itself under this load."""
    requests = pytestconfig.getoption("requests")
    model = make_model(tmp_path / "model", "mellum")
    flags = ("--enable-cache-report", "--load-format", "dummy", "--swa-full-tokens-ratio", "1.0")
    with sglang_world(tmp_path, SglangOptions(tokens=6144, model=model, flags=flags)) as world:
        report = await MixedRun(world, forms=ALONE).play(requests, restarts=False)
        audit = world.engine()["audit"]
        tell(*report.lines(), f"audit: {audit}")
    assert {seen.broken for seen in report.seen} <= {"", LEFT}
    # What others evict, or leave in a window, between a placement and its prefill is not foreseen.
    assert len(report.misses) <= 4 + requests // 20
    assert report.evicted > 100
    assert audit["checked"] > requests // 2
