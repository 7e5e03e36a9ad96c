import asyncio
from array import array

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine_adapter import Tier
from proxy.core.placement.decision import Cost
from proxy.core.placement.load import Work
from proxy.core.placement.pairs import TransferResult
from proxy.core.quotas import DAY_S, UseBook, Used
from proxy.fleet.engine import EngineState
from proxy.fleet.fleet import Fleet
from proxy.observe.metrics import LEFT, OTHER_TENANTS, Metrics
from proxy.prompt import Prompt
from proxy.request.records import RequestRecord
from tests.fakes import INFO, FakeAdapter
from tests.placements import placement_of

LABELS = {"model": "m", "engine": "a"}


@pytest.fixture
def fleet():
    fleet = Fleet()
    fleet.add(FakeAdapter("a"))
    return fleet


def samples(metrics):
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def value(metrics, name, **labels):
    return samples(metrics).get((name, frozenset(labels.items())))


def record(**fields):
    placement = placement_of("a", 32, 40, (Cost("a"),), "lowest cost")
    prompt = Prompt(array("i", range(40)))
    defaults = {
        "placement": placement,
        "prompt": prompt,
        "status": 200,
        "attempts": ["b", "a"],
        "served_as": "m",
    }
    return RequestRecord("r", 0.0, "/v1/x", "m", None, stream=True, **{**defaults, **fields})


def test_a_finished_request_is_counted(fleet):
    metrics = Metrics(fleet)
    metrics.observe(record(reported_tokens=16, duration_s=1.5, output_tokens=7))
    metrics.observe(record(reported_tokens=32, duration_s=0.5))
    assert value(metrics, "kvpin_requests_total", status="200", **LABELS) == 2
    assert value(metrics, "kvpin_retries_total", model="m") == 2
    assert value(metrics, "kvpin_prompt_tokens_total", **LABELS) == 80
    assert value(metrics, "kvpin_predicted_cached_tokens_total", **LABELS) == 64
    assert value(metrics, "kvpin_cached_tokens_total", **LABELS) == 48
    assert value(metrics, "kvpin_available_cached_tokens_total", **LABELS) == 64
    assert value(metrics, "kvpin_saved_prefill_seconds_total", **LABELS) == 0  # its engine has not connected
    assert metrics.ended == 2
    assert metrics.reuse()["a"].delivered_tokens == 48
    assert value(metrics, "kvpin_mispredictions_total", **LABELS) == 1
    assert value(metrics, "kvpin_generation_tokens_total", **LABELS) == 7
    assert value(metrics, "kvpin_request_duration_seconds_sum", **LABELS) == pytest.approx(2.0)


def test_the_parts_of_a_streams_time(fleet):
    metrics = Metrics(fleet)
    stream = {"arrived": 100.0, "placed": 100.3, "queued_s": 0.25, "first_byte_s": 0.5, "duration_s": 3.0}
    metrics.observe(record(attempts=["a"], output_tokens=23, **stream))
    metrics.observe(record(attempts=["b", "a"], output_tokens=23, error="broken off", **stream))
    assert value(metrics, "kvpin_placement_seconds_sum", model="m") == pytest.approx(0.05)
    assert value(metrics, "kvpin_placement_seconds_count", model="m") == 1
    assert value(metrics, "kvpin_time_to_first_token_seconds_sum", **LABELS) == pytest.approx(2 * 0.8)
    assert value(metrics, "kvpin_time_per_output_token_seconds_sum", **LABELS) == pytest.approx(0.1)
    assert value(metrics, "kvpin_time_per_output_token_seconds_count", **LABELS) == 1
    metrics.observe(record(attempts=["a"], output_tokens=None, events=12, **stream))
    assert value(metrics, "kvpin_time_per_output_token_seconds_sum", **LABELS) == pytest.approx(0.3)


def test_an_answer_that_is_no_stream_has_no_first_token(fleet):
    metrics = Metrics(fleet)
    whole = record(placed=100.0, arrived=99.0, first_byte_s=2.0, duration_s=3.0, output_tokens=9)
    whole.stream = False
    metrics.observe(whole)
    assert value(metrics, "kvpin_time_to_first_token_seconds_count", **LABELS) is None
    assert value(metrics, "kvpin_time_per_output_token_seconds_count", **LABELS) is None


def test_the_use_of_each_tenant_is_counted_by_day_and_model(fleet):
    book = UseBook()
    metrics = Metrics(fleet, use=book)
    for tenant, started, fields in (
        ("acme", 5.0, {}),
        ("acme", DAY_S - 1.0, {"error": "died"}),
        ("acme", float(DAY_S), {"lora": "l"}),
        (None, 5.0, {"placement": None, "reported_tokens": None, "output_tokens": None}),
        ("globex", 5.0, {"output_tokens": None, "events": 9}),  # its client did not ask for the usage
    ):
        each = record(**{"reported_tokens": 16, "output_tokens": 3, **fields})
        each.tenant, each.started = tenant, started
        metrics.observe(each)
    assert book == {
        (0, "acme", "m"): Used(2, 1, 80, 32, 6),
        (1, "acme", "l"): Used(1, 0, 40, 16, 3),
        (0, "", ""): Used(1, 0, 0, 0, 0),
        (0, "globex", "m"): Used(1, 0, 40, 16, 9),
    }
    assert value(metrics, "kvpin_generation_tokens_total", **LABELS) == 15


def test_so_many_tenants_have_metrics_of_their_own(fleet):
    metrics = Metrics(fleet, tenants=2)
    for tenant in ("acme", "globex", "initech", "acme", "hooli", None):
        each = record(reported_tokens=16, output_tokens=3)
        each.tenant = tenant
        metrics.observe(each)
    counted = {
        tenant: value(metrics, "kvpin_tenant_cached_tokens_total", tenant=tenant)
        for tenant in ("acme", "globex", "initech", OTHER_TENANTS)
    }
    assert counted == {"acme": 32, "globex": 16, "initech": None, OTHER_TENANTS: 32}
    assert value(metrics, "kvpin_tenant_requests_total", tenant="acme", status="200") == 2
    assert value(metrics, "kvpin_tenant_prompt_tokens_total", tenant="acme") == 80
    assert value(metrics, "kvpin_tenant_generation_tokens_total", tenant="acme") == 6
    unasked = Metrics(fleet)
    unasked.observe(each)
    assert not any("tenant" in name for name, _ in samples(unasked))


def test_placements_are_counted_by_what_decided_them(fleet):
    metrics = Metrics(fleet)
    for cached in (0, 16, 16):
        costs = Cost("a"), Cost("b", cached_tokens=cached, queue_s=1.0)
        metrics.observe(record(placement=placement_of("a", 0, 40, costs, "lowest cost")))
    assert value(metrics, "kvpin_placements_total", model="m", reason="spread") == 1
    assert value(metrics, "kvpin_placements_total", model="m", reason="released") == 2


def test_a_request_nobody_served_has_no_engine_and_no_model_of_the_clients_making(fleet):
    metrics = Metrics(fleet)
    metrics.observe(record(placement=None, prompt=None, status=None, attempts=[]))
    assert value(metrics, "kvpin_requests_total", model="", engine="", status="failed") == 1
    assert value(metrics, "kvpin_retries_total", model="") == 0
    assert not any("kvpin_prompt_tokens_total" in name for name, _ in samples(metrics))


def test_an_unknown_prompt_predicts_nothing(fleet):
    metrics = Metrics(fleet)
    metrics.observe(record(prompt=None))
    assert value(metrics, "kvpin_predicted_cached_tokens_total", **LABELS) is None


def test_prompts_whose_tokens_the_engine_told_are_counted(fleet):
    metrics = Metrics(fleet)
    for agree in (None, True, True, False):
        metrics.observe(record(tokens_agree=agree))
    name = "kvpin_tokenisation_checks_total"
    assert value(metrics, name, result="same", **LABELS) == 2
    assert value(metrics, name, result="different", **LABELS) == 1


async def test_engines_that_came_and_went_leave_no_series_and_stay_in_the_totals(fleet):
    metrics = Metrics(fleet)
    page = metrics.render()
    for number in range(2000):
        engine = fleet.add(FakeAdapter(f"pod-{number}"))
        fleet.join(engine, INFO)
        placement = placement_of(engine.id, 32, 40, (Cost(engine.id),), "lowest cost")
        done = record(placement=placement, reported_tokens=32, first_byte_s=0.04, duration_s=1.5)
        metrics.observe(done)
        fleet.remove(engine)
        metrics.observe(done)  # one of its requests ends after it has left
    # Also where nobody reads the page, nothing is kept of engines that have left.
    assert sum(len(family) for family in metrics.families.values()) < 100
    later = metrics.render()
    assert b"pod-" not in later
    assert len(later) < len(page) + 20_000
    assert await metrics.page() == later
    assert value(metrics, "kvpin_requests_total", model="m", engine=LEFT, status="200") == 2000
    assert metrics.ended == 4000
    assert metrics.total_reuse().delivered_tokens == 4000 * 32
    assert set(metrics.reuse()) == {LEFT}


async def test_requests_are_served_while_the_page_of_many_engines_is_written(fleet):
    metrics = Metrics(fleet)
    for number in range(2000):
        engine = fleet.add(FakeAdapter(f"pod-{number}"))
        metrics.observe(record(placement=placement_of(engine.id, 32, 40, (Cost(engine.id),), "lowest cost")))
    served = 0

    async def serve():
        nonlocal served
        while True:
            await asyncio.sleep(0)
            served += 1

    serving = asyncio.create_task(serve())
    page = await metrics.page()
    serving.cancel()
    assert page == metrics.render()
    assert served > 2000 / 100


def test_transfers_are_counted_by_their_two_engines(fleet):
    metrics = Metrics(fleet)
    metrics.observe(record(prefilled_by="a", transfer=TransferResult.MOVED, first_leg_s=0.5, transfer_s=0.1))
    metrics.observe(record(prefilled_by="gone", transfer=TransferResult.FAILED, first_leg_s=2.0))
    metrics.observe(record())
    assert value(metrics, "kvpin_transfers_total", model="m", prefiller="a", result="moved") == 1
    assert value(metrics, "kvpin_transfers_total", model="m", prefiller=LEFT, result="failed") == 1
    assert value(metrics, "kvpin_first_leg_seconds_sum", model="m") == 2.5
    assert value(metrics, "kvpin_transfer_seconds_count", model="m") == 1


async def test_gauges_are_read_from_the_fleet(fleet):
    (engine,), metrics = fleet.engines.values(), Metrics(fleet)
    assert value(metrics, "kvpin_engine_ready", engine="a") == 0
    pool = fleet.join(engine, INFO)
    engine.state = EngineState.READY
    engine.audit.synced()
    engine.ledger.begin(0.0, 1.0, Work(10))
    pool.index.store("a", Tier.GPU, [1, 2])
    pool.index.store("a", Tier.HOST, [2])
    for name, number in (("ready", 1), ("precise", 1), ("in_flight", 1), ("draining", 0)):
        assert value(metrics, f"kvpin_engine_{name}", engine="a") == number
    assert value(metrics, "kvpin_engine_blocks", engine="a", tier="gpu") == 2
    assert value(metrics, "kvpin_engine_blocks", engine="a", tier="host") == 1
    assert value(metrics, "kvpin_index_entries", model="m") == 2
    engine.state = EngineState.DRAINING
    assert value(metrics, "kvpin_engine_ready", engine="a") == 0
    assert value(metrics, "kvpin_engine_draining", engine="a") == 1
