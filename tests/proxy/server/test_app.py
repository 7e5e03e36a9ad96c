import asyncio
import json
import time
from array import array

import httpx
import numpy as np
import pytest
from safetensors.numpy import save
from structlog.testing import capture_logs

from engine_adapter import HttpTransport, JsonBody
from proxy.api.siblings import Siblings
from proxy.control.reconciler import Reconciler
from proxy.errors import BodyTooLarge
from proxy.prompt import Prompt
from proxy.request.records import RequestRecord
from proxy.server.app import Proxy, build_app
from proxy.settings import EngineSettings, Settings
from tests.fakes import FakeAdapter, serving

ELSEWHERE = EngineSettings(kind="vllm", url="http://127.0.0.1:1", id="v")


async def test_every_limit_reaches_what_it_limits():
    settings = Settings(
        reuse=True,
        retries=5,
        trust_media_uuids=True,
        limits={"body_bytes": 1000, "request_records": 3, "prompt_table_bytes": 10},
        health={"interval_s": 0.25, "timeout_s": 0.75},
    )
    proxy = Proxy(settings, HttpTransport())
    try:
        assert proxy.flow.rules.retries == 5
        for data in ("eA==", "eQ=="):
            part = {"image_url": f"data:;base64,{data}", "uuid": "u"}
            body = JsonBody(json.dumps({"input": [{"content": [part]}]}).encode())
            assert await proxy.flow.preparation.media.admit(body, None) is body
        assert (proxy.monitor.interval_s, proxy.monitor.timeout_s) == (0.25, 0.75)
        with pytest.raises(BodyTooLarge, match="more than 10 bytes"):
            proxy.tables.put(save({"t": np.zeros((2, 4), np.float32)}))
        for number in range(5):
            proxy.flow.requests.add(RequestRecord(str(number), 0.0, "/v1/x", None, None, False))
        assert [record.request_id for record in proxy.flow.requests] == ["2", "3", "4"]
        async with serving(build_app(proxy)) as url, httpx.AsyncClient(verify=False) as client:  # noqa: S501
            answer = await client.post(f"{url}/v1/completions", content=b" " * 1001)
        assert answer.status_code == 413
    finally:
        await proxy.stop()


async def test_new_limits_of_bodies_count_without_a_restart():
    proxy = Proxy(Settings(engines=(ELSEWHERE,), limits={"body_bytes": 1000}), HttpTransport())
    proxy.reload(Settings(engines=(ELSEWHERE,), limits={"body_bytes": 3000, "bodies_bytes": 4000}))
    assert (proxy.gate.longest, proxy.gate.bodies.limit) == (3000, 4000)
    await proxy.stop()


async def test_use_is_kept_when_the_number_of_workers_changes(tmp_path):
    """Three workers, then one process, then two workers: the first one has what no other counts."""
    key, of_two = (20_000, "acme", "m"), Siblings(tmp_path, 1, 2)

    def made(name, siblings=None):
        return Proxy(Settings(state_dir=tmp_path / name), HttpTransport(), siblings)

    for number in (1, 2, 3):
        worker = made(f"worker-{number}", Siblings(tmp_path, number, 3))
        worker.use[key].requests = number
        await worker.stop()
    alone = made(".")
    assert alone.use[key].requests == 6
    await alone.stop()
    second, first = made("worker-2", of_two), made("worker-1", of_two)
    assert (first.use[key].requests, second.use) == (6, {})
    await first.stop()
    await second.stop()


async def test_a_recording_ends_before_it_is_too_long(tmp_path):
    path = tmp_path / "traffic.jsonl"
    proxy = Proxy(Settings(reuse=True, record_traffic=path, record_traffic_bytes=100), HttpTransport())
    try:
        proxy.flow.observe(
            RequestRecord("r", 0.0, "/v1/x", "m", None, False, prompt=Prompt(array("i", range(700))))
        )
    finally:
        await proxy.stop()
    assert path.stat().st_size <= 100
    assert "hash_ids" not in path.read_text()


async def test_of_several_workers_one_sends_metrics_to_a_collector(tmp_path):
    one, two = (Siblings(tmp_path, number, 2) for number in (1, 2))
    assert one.speaks()
    proxy = Proxy(Settings(), HttpTransport(), two)
    assert proxy.page() == b""
    one.retire()
    assert b"kvpin_requests_total" in proxy.page()
    await proxy.stop()


class Ends:
    """An adapter or a process whose end is noted, and fails if there is an `error`."""

    def __init__(self, name, closed, error=""):
        self.id, self.closed, self.error = name, closed, error

    async def stop(self):
        self.closed.append(self.id)
        if self.error:
            raise OSError(self.error)


async def test_a_failure_to_close_one_engine_does_not_keep_the_others_open(monkeypatch):
    proxy, closed = Proxy(Settings(), HttpTransport()), []
    for name, error in (("a", ""), ("b", "disk full"), ("c", "")):
        proxy.fleet.add(FakeAdapter(name)).adapter.aclose = Ends(name, closed, error).stop
    monkeypatch.setattr(Reconciler, "processes", [Ends("p0", closed, "gone"), Ends("p1", closed)])
    with capture_logs() as entries:
        await proxy.stop()
    assert closed == ["a", "b", "c", "p0", "p1"]
    assert [(entry["engine"], str(entry["exc_info"])) for entry in entries] == [
        ("b", "disk full"),
        ("p0", "gone"),
    ]


@pytest.mark.parametrize(("level", "explained"), [("info", 0), ("debug", 1)])
async def test_a_blocked_loop_is_measured_and_at_debug_explained(level, explained):
    proxy = Proxy(Settings(engines=(ELSEWHERE,), logs={"level": level}), HttpTransport())
    with capture_logs() as logs:
        proxy.start()
        await asyncio.sleep(0.06)
        time.sleep(0.25)  # noqa: ASYNC251 - the block
        await asyncio.sleep(0.02)
        await proxy.stop()
    assert b'kvpin_loop_lag_seconds_bucket{le="0.2"} ' in proxy.metrics.render()
    assert proxy.metrics.loop_lag.sum > 0.19
    blocked = [line for line in logs if line["event"].startswith("the event loop was blocked")]
    assert bool(blocked) == bool(explained)
    assert not blocked or "test_app.py" in str(max(blocked, key=lambda line: line["blocked_s"])["running"])
