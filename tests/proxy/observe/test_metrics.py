import asyncio
from array import array
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine_adapter import Tier
from proxy.core.placement.decision import Cost
from proxy.core.placement.load import LoadSample, Work
from proxy.core.placement.pairs import TransferResult
from proxy.core.quotas import DAY_S, UseBook, Used
from proxy.fleet.engine import EngineState
from proxy.fleet.fleet import Fleet
from proxy.observe import metrics
from proxy.observe.metrics import LEFT, OTHER_TENANTS, Metrics, available_tokens
from proxy.prompt import Prompt
from proxy.request.records import RequestRecord
from tests.fakes import INFO, FakeAdapter, add_ready
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


def placed(predicted=32, *elsewhere, engine="a"):
    return placement_of(engine, predicted, 40, (Cost(engine), *elsewhere), "lowest cost")


def record(**fields):
    tenant, prompt = fields.pop("tenant", None), Prompt(array("i", range(40)))
    defaults = {
        "placement": placed(),
        "prompt": prompt,
        "status": 200,
        "attempts": ["b", "a"],
        "served_as": "m",
    }
    return RequestRecord("r", 0.0, "/v1/x", "m", tenant, **{"stream": True, **defaults, **fields})


def counted(fleet, *records, **options):
    """The metrics of requests with these fields."""
    metrics = Metrics(fleet, **options)
    for fields in records:
        metrics.observe(record(**fields))
    return metrics


def test_a_finished_request_is_counted(fleet):
    one = {"reported_tokens": 16, "duration_s": 1.5, "output_tokens": 7}
    metrics = counted(fleet, one, {"reported_tokens": 32, "duration_s": 0.5})
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


def test_what_an_engine_with_small_pages_reuses_beyond_whole_blocks_is_no_misprediction(fleet):
    reports = [{"reported_tokens": tokens} for tokens in (31, 32, 47, 48)]
    for size, missed in ((16, 3), (1, 2)):
        add_ready(fleet, "a", tokens_per_block=size)
        assert value(counted(fleet, *reports), "kvpin_mispredictions_total", **LABELS) == missed


def test_the_parts_of_a_streams_time(fleet):
    stream = {"arrived": 100.0, "placed": 100.3, "queued_s": 0.25, "first_byte_s": 0.5, "duration_s": 3.0}
    good = {"attempts": ["a"], "output_tokens": 23, **stream}
    metrics = counted(fleet, good, good | {"attempts": ["b", "a"], "error": "broken off"})
    assert value(metrics, "kvpin_placement_seconds_sum", model="m") == pytest.approx(0.05)
    assert value(metrics, "kvpin_placement_seconds_count", model="m") == 1
    assert value(metrics, "kvpin_time_to_first_token_seconds_sum", **LABELS) == pytest.approx(2 * 0.8)
    assert value(metrics, "kvpin_time_per_output_token_seconds_sum", **LABELS) == pytest.approx(0.1)
    assert value(metrics, "kvpin_time_per_output_token_seconds_count", **LABELS) == 1
    told_no_tokens = counted(fleet, good | {"output_tokens": None, "events": 12})
    assert value(told_no_tokens, "kvpin_time_per_output_token_seconds_sum", **LABELS) == pytest.approx(0.2)
    whole = counted(fleet, good | {"stream": False})
    assert value(whole, "kvpin_time_to_first_token_seconds_count", **LABELS) is None
    assert value(whole, "kvpin_time_per_output_token_seconds_count", **LABELS) is None


def test_the_use_of_each_tenant_is_counted_by_day_and_model(fleet):
    book, told = UseBook(), {"reported_tokens": 16, "output_tokens": 3}
    metrics = Metrics(fleet, use=book)
    for started, fields in (
        (5.0, told | {"tenant": "acme"}),
        (DAY_S - 1.0, told | {"tenant": "acme", "error": "died"}),
        (float(DAY_S), told | {"tenant": "acme", "lora": "l"}),
        (5.0, {"placement": None}),
        (5.0, {"tenant": "globex", "reported_tokens": 16, "events": 9}),  # its client asked for no usage
    ):
        each = record(**fields)
        each.started = started
        metrics.observe(each)
    assert book == {
        (0, "acme", "m"): Used(2, 1, 80, 32, 6),
        (1, "acme", "l"): Used(1, 0, 40, 16, 3),
        (0, "", ""): Used(1, 0, 0, 0, 0),
        (0, "globex", "m"): Used(1, 0, 40, 16, 9),
    }
    assert value(metrics, "kvpin_generation_tokens_total", **LABELS) == 15


def test_so_many_tenants_have_metrics_of_their_own(fleet):
    told = {"reported_tokens": 16, "output_tokens": 3}
    names = ("acme", "globex", "initech", "acme", "hooli", None)
    metrics = counted(fleet, *(told | {"tenant": name} for name in names), tenants=2)
    for name, tokens in (("acme", 32), ("globex", 16), ("initech", None), (OTHER_TENANTS, 32)):
        assert value(metrics, "kvpin_tenant_cached_tokens_total", tenant=name) == tokens
    assert value(metrics, "kvpin_tenant_requests_total", tenant="acme", status="200") == 2
    assert value(metrics, "kvpin_tenant_prompt_tokens_total", tenant="acme") == 80
    assert value(metrics, "kvpin_tenant_generation_tokens_total", tenant="acme") == 6
    unasked = counted(fleet, told | {"tenant": "acme"})
    assert not any("tenant" in name for name, _ in samples(unasked))


def test_placements_are_counted_by_what_decided_them(fleet):
    elsewhere = (Cost("b", cached_tokens=cached, queue_s=1.0) for cached in (0, 16, 16))
    metrics = counted(fleet, *({"placement": placed(0, each)} for each in elsewhere))
    assert value(metrics, "kvpin_placements_total", model="m", reason="spread") == 1
    assert value(metrics, "kvpin_placements_total", model="m", reason="released") == 2


def test_a_request_nobody_served_has_no_engine_and_no_model_of_the_clients_making(fleet):
    metrics = counted(fleet, {"placement": None, "prompt": None, "status": None, "attempts": []})
    assert value(metrics, "kvpin_requests_total", model="", engine="", status="failed") == 1
    assert value(metrics, "kvpin_retries_total", model="") == 0
    assert not any("kvpin_prompt_tokens_total" in name for name, _ in samples(metrics))


def test_a_refusal_is_counted_by_its_reason(fleet):
    refused = {"placement": None, "prompt": None, "attempts": []}
    waited, limited = refused | {"status": 503, "queued_s": 1.0}, refused | {"status": 429}
    metrics = counted(fleet, waited, refused | {"status": 503}, limited)
    assert value(metrics, "kvpin_refused_total", reason="busy") == 1
    assert value(metrics, "kvpin_refused_total", reason="limit") == 1


def test_an_unknown_prompt_predicts_nothing(fleet):
    metrics = counted(fleet, {"prompt": None})
    assert value(metrics, "kvpin_predicted_cached_tokens_total", **LABELS) is None


def test_prompts_whose_tokens_the_engine_told_are_counted(fleet):
    metrics = counted(fleet, *({"tokens_agree": agree} for agree in (None, True, True, False)))
    for result, number in (("same", 2), ("different", 1)):
        assert value(metrics, "kvpin_tokenisation_checks_total", result=result, **LABELS) == number


def test_what_alerts_watch_is_there_before_its_first_event():
    fleet = Fleet()
    add_ready(fleet, "a", loras=frozenset({"l"}))
    metrics = Metrics(fleet)
    for model in ("m", "l"):
        assert value(metrics, "kvpin_interrupted_streams_total", model=model, result="broken") == 0
    assert value(metrics, "kvpin_tokenisation_checks_total", result="different", **LABELS) == 0
    metrics.observe(record(tokens_agree=False, interrupted=1, error="broken off"))
    assert value(metrics, "kvpin_interrupted_streams_total", model="m", result="broken") == 1
    assert value(metrics, "kvpin_tokenisation_checks_total", result="different", **LABELS) == 1


def test_a_tenants_cpu_seconds_never_fall(fleet, monkeypatch):
    spent = {("acme", "parse"): 2.0, ("globex", "parse"): 3.0}
    monkeypatch.setattr(metrics, "THREADS", SimpleNamespace(spent=spent))
    counts = Metrics(fleet, tenants=1)
    for _ in range(2):
        assert value(counts, "kvpin_tenant_cpu_seconds_total", tenant="acme", what="parse") == 2
        assert value(counts, "kvpin_tenant_cpu_seconds_total", tenant=OTHER_TENANTS, what="parse") == 3
        counts.observe(record(tenant="globex"))
        counts.observe(record(tenant="acme"))


async def test_engines_that_came_and_went_leave_no_series_and_stay_in_the_totals(fleet):
    metrics = Metrics(fleet)
    page = metrics.render()
    for number in range(300):
        engine = fleet.add(FakeAdapter(f"pod-{number}"))
        fleet.join(engine, INFO)
        timed = {"reported_tokens": 32, "first_byte_s": 0.04, "duration_s": 1.5}
        done = record(placement=placed(engine=engine.id), **timed)
        metrics.observe(done)
        fleet.remove(engine)
        metrics.observe(done)  # one of its requests ends after it has left
    # Also where nobody reads the page, nothing is kept of engines that have left.
    assert sum(len(family) for family in metrics.families.values()) < 100
    later = metrics.render()
    assert b"pod-" not in later
    assert len(later) < len(page) + 20_000
    assert await metrics.page() == later
    assert value(metrics, "kvpin_requests_total", model="m", engine=LEFT, status="200") == 300
    assert metrics.ended == 600
    assert metrics.total_reuse().delivered_tokens == 600 * 32
    assert set(metrics.reuse()) == {LEFT}


async def test_requests_are_served_while_the_page_of_many_engines_is_written(fleet):
    metrics = Metrics(fleet)
    for number in range(500):
        engine = fleet.add(FakeAdapter(f"pod-{number}"))
        metrics.observe(record(placement=placed(engine=engine.id)))
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
    assert served > 500 / 100


def test_transfers_are_counted_by_their_two_engines(fleet):
    moved = {"prefilled_by": "a", "transfer": TransferResult.MOVED, "first_leg_s": 0.5, "transfer_s": 0.1}
    failed = {"prefilled_by": "gone", "transfer": TransferResult.FAILED, "first_leg_s": 2.0}
    metrics = counted(fleet, moved, failed, {})
    assert value(metrics, "kvpin_transfers_total", model="m", prefiller="a", result="moved") == 1
    assert value(metrics, "kvpin_transfers_total", model="m", prefiller=LEFT, result="failed") == 1
    assert value(metrics, "kvpin_first_leg_seconds_sum", model="m") == 2.5
    assert value(metrics, "kvpin_transfer_seconds_count", model="m") == 1


async def test_gauges_are_read_from_the_fleet(fleet):
    (engine,), metrics = fleet.engines.values(), Metrics(fleet)
    assert (value(metrics, "kvpin_engine_ready", engine="a"), value(metrics, "kvpin_ready")) == (0, 0)
    pool = fleet.join(engine, INFO)
    engine.state = EngineState.READY
    engine.audit.synced()
    engine.ledger.begin(0.0, 1.0, Work(10))
    pool.index.store("a", Tier.GPU, [1, 2])
    pool.index.store("a", Tier.HOST, [2])
    assert value(metrics, "kvpin_ready") == 1
    for name, number in (("ready", 1), ("precise", 1), ("in_flight", 1), ("draining", 0)):
        assert value(metrics, f"kvpin_engine_{name}", engine="a") == number
    assert value(metrics, "kvpin_engine_blocks", engine="a", tier="gpu") == 2
    assert value(metrics, "kvpin_engine_blocks", engine="a", tier="host") == 1
    assert value(metrics, "kvpin_index_entries", model="m") == 2
    engine.state = EngineState.DRAINING
    assert value(metrics, "kvpin_engine_ready", engine="a") == 0
    assert (value(metrics, "kvpin_engine_draining", engine="a"), value(metrics, "kvpin_ready")) == (1, 0)
    engine.state = EngineState.READY
    engine.give_to("other", is_served_there=True)
    assert (value(metrics, "kvpin_engine_ready", engine="a"), value(metrics, "kvpin_ready")) == (0, 1)
    assert value(Metrics(Fleet()), "kvpin_ready") == 0


def held(predicted, *elsewhere, restore_s=0.0):
    costs = (
        Cost("a", cached_tokens=predicted, restore_s=restore_s),
        *(Cost(f"b{held}", cached_tokens=held) for held in elsewhere),
    )
    return placement_of("a", predicted, 1024, costs, "lowest cost")


@pytest.fixture
def joined():
    joined = Fleet()
    add_ready(joined, "a")
    return joined


def reused(placement, reported):
    prompt = Prompt(array("i", range(1024)))
    given = {"placement": placement, "prompt": prompt, "served_as": "m", "reported_tokens": reported}
    return RequestRecord("r", 0.0, "/v1/x", "m", None, stream=True, **given)


@pytest.mark.parametrize(
    ("placement", "available"),
    [(held(32), 32), (held(32, 0, 16), 32), (held(32, 64, 48), 64), (held(0, 0), 0)],
)
def test_available_is_what_any_engine_held(placement, available):
    assert available_tokens(placement) == available


def learn(joined, tok_s=4000.0):
    joined.pools["m"].placer.books["a"].rates.learn(LoadSample(Work(1024), 1024 / tok_s, 0.0))


@pytest.mark.parametrize(("restore_s", "reported"), [(60.0, 1008), (0.0, None), (0.0, 0)])
def test_nothing_is_saved_by_a_long_restore_or_without_reuse(joined, restore_s, reported):
    learn(joined)
    assert next(Metrics(joined).saved_prefill(reused(held(1008), 1008)))[2] > 0
    saved = Metrics(joined).saved_prefill(reused(held(1008, restore_s=restore_s), reported))
    assert sum(seconds for *_, seconds in saved) == 0


def test_reuse_before_the_first_learned_rate_is_valued_by_that_rate(joined):
    metrics = Metrics(joined)
    for _ in range(3):
        metrics.observe(reused(held(1008), 1008))
    assert metrics.total_reuse().saved_s == 0
    assert metrics.total_reuse().delivered_tokens == 3024
    learn(joined, tok_s=462.0)
    metrics.observe(reused(held(0), 0))
    assert metrics.total_reuse().saved_s == pytest.approx(3024 / 462)
    assert metrics.reuse()["a"].saved_s == metrics.total_reuse().saved_s
    shown = f'kvpin_saved_prefill_seconds_total{{engine="a",model="m"}} {metrics.total_reuse().saved_s}'
    assert shown in metrics.render().decode()
    metrics.observe(reused(held(1008), 1008))
    assert metrics.total_reuse().saved_s == pytest.approx(4032 / 462)


def test_not_all_of_it_waits(joined, monkeypatch):
    monkeypatch.setattr(metrics, "MAX_WAITING", 2)
    saved, known = Metrics(joined), reused(held(1008), 1008)
    for _ in range(5):
        assert list(saved.saved_prefill(known)) == []
    learn(joined)
    assert len(list(saved.saved_prefill(known))) == 2
