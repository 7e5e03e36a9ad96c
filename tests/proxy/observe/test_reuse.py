from array import array

import pytest

from proxy.core.placement.decision import Cost, Placement
from proxy.fleet.fleet import Fleet
from proxy.observe.reuse import available_tokens, saved_s
from proxy.prompt import Prompt
from proxy.request.records import RequestRecord
from tests.fakes import add_ready


def placed(predicted, *elsewhere, restore_s=0.0):
    costs = (
        Cost("a", cached_tokens=predicted, restore_s=restore_s),
        *(Cost(f"b{held}", cached_tokens=held) for held in elsewhere),
    )
    return Placement.of("a", predicted, 1024, costs, "lowest cost")


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


def test_what_was_reused_was_not_computed(fleet):
    rates = fleet.pools["m"].placer.books["a"].rates
    assert saved_s(fleet, record(placed(1008), 1008)) == rates.prefill_s(1024) - rates.prefill_s(16)
    half = saved_s(fleet, record(placed(1008, restore_s=0.001), 512))
    assert half == pytest.approx(rates.prefill_s(1024) - rates.prefill_s(512) - 0.001)


def test_a_restore_that_takes_longer_saves_nothing(fleet):
    assert saved_s(fleet, record(placed(1008, restore_s=60.0), 1008)) == 0


@pytest.mark.parametrize("reported", [None, 0])
def test_nothing_is_saved_without_reuse(fleet, reported):
    assert saved_s(fleet, record(placed(1008), reported)) == 0


def test_an_engine_that_has_left_saves_nothing(fleet):
    fleet.remove(fleet.engine("a"))
    assert saved_s(fleet, record(placed(1008), 1008)) == 0
