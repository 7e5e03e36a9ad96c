from array import array

import pytest

from proxy.core.placement.decision import Cost
from proxy.core.placement.load import LoadSample, Work
from proxy.fleet.fleet import Fleet
from proxy.observe import metrics
from proxy.observe.metrics import Metrics, SavedPrefill, available_tokens
from proxy.prompt import Prompt
from proxy.request.records import RequestRecord
from tests.fakes import add_ready
from tests.placements import placement_of


def placed(predicted, *elsewhere, restore_s=0.0):
    costs = (
        Cost("a", cached_tokens=predicted, restore_s=restore_s),
        *(Cost(f"b{held}", cached_tokens=held) for held in elsewhere),
    )
    return placement_of("a", predicted, 1024, costs, "lowest cost")


@pytest.fixture
def fleet():
    fleet = Fleet()
    add_ready(fleet, "a")
    return fleet


def record(placement, reported):
    prompt = Prompt(array("i", range(1024)))
    given = {"placement": placement, "prompt": prompt, "served_as": "m", "reported_tokens": reported}
    return RequestRecord("r", 0.0, "/v1/x", "m", None, stream=True, **given)


@pytest.mark.parametrize(
    ("placement", "available"),
    [(placed(32), 32), (placed(32, 0, 16), 32), (placed(32, 64, 48), 64), (placed(0, 0), 0)],
)
def test_available_is_what_any_engine_held(placement, available):
    assert available_tokens(placement) == available


def learn(fleet, tok_s=4000.0):
    rates = fleet.pools["m"].placer.books["a"].rates
    rates.learn(LoadSample(Work(1024), 1024 / tok_s, 0.0))
    return rates


def saved_s(fleet, *records):
    saved = SavedPrefill(fleet)
    return sum(seconds for each in records for _, _, seconds in saved.observe(each))


def test_a_restore_that_takes_longer_saves_nothing(fleet):
    learn(fleet)
    assert saved_s(fleet, record(placed(1008, restore_s=60.0), 1008)) == 0


@pytest.mark.parametrize("reported", [None, 0])
def test_nothing_is_saved_without_reuse(fleet, reported):
    learn(fleet)
    assert saved_s(fleet, record(placed(1008), reported)) == 0


def test_reuse_before_the_first_learned_rate_is_valued_by_that_rate(fleet):
    """It was valued by a first guess of 4,000 tokens/s, whatever the engine."""
    metrics = Metrics(fleet)
    for _ in range(3):
        metrics.observe(record(placed(1008), 1008))
    assert metrics.total_reuse().saved_s == 0
    assert metrics.total_reuse().delivered_tokens == 3024
    learn(fleet, tok_s=462.0)
    metrics.observe(record(placed(0), 0))
    assert metrics.total_reuse().saved_s == pytest.approx(3024 / 462)
    assert metrics.reuse()["a"].saved_s == metrics.total_reuse().saved_s
    shown = f'kvpin_saved_prefill_seconds_total{{engine="a",model="m"}} {metrics.total_reuse().saved_s}'
    assert shown in metrics.render().decode()
    metrics.observe(record(placed(1008), 1008))
    assert metrics.total_reuse().saved_s == pytest.approx(4032 / 462)


def test_not_all_of_it_waits(fleet, monkeypatch):
    monkeypatch.setattr(metrics, "MAX_WAITING", 2)
    saved, known = SavedPrefill(fleet), record(placed(1008), 1008)
    for _ in range(5):
        assert list(saved.observe(known)) == []
    learn(fleet)
    assert len(list(saved.observe(known))) == 2
