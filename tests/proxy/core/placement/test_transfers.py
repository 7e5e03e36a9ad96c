import pytest

from proxy.core.placement.transfers import HANDSHAKE_S, KEPT_S, SPEEDUP, WINDOW, Transfers


@pytest.fixture
def transfers():
    return Transfers(lambda: 1000.0)


def met(transfers, *links):
    for source, target in links:
        transfers.measured(0.0, source, target, 1000, 9.0)


def test_before_anything_was_measured_moving_is_faster_than_computing(transfers):
    assert transfers.seconds(0.0, "p", "d", 2000) == HANDSHAKE_S + 2000 / (SPEEDUP * 1000)


def test_the_first_transfer_tells_nothing_of_the_rate(transfers):
    met(transfers, ("p", "d"))
    assert transfers.seconds(0.0, "p", "d", 2000) == 2000 / (SPEEDUP * 1000)
    assert transfers.seconds(0.0, "p", "e", 0) == HANDSHAKE_S, "these two have not met"


def test_a_link_is_as_fast_as_its_fastest_transfer(transfers):
    """Requests that waited for their engine make no link slow."""
    met(transfers, ("p", "d"))
    for seconds in (40.0, 1.0, 2.0, 40.0):
        transfers.measured(1.0, "p", "d", 1000, seconds)
    assert transfers.seconds(1.0, "p", "d", 500) == 0.5
    transfers.measured(1.0, "p", "d", 10, 0.001)  # a round trip
    assert transfers.seconds(1.0, "p", "d", 500) == 0.5


def test_a_link_that_has_become_slow_is_slow_after_some_transfers(transfers):
    met(transfers, ("p", "d"))
    transfers.measured(1.0, "p", "d", 1000, 1.0)
    for _ in range(WINDOW):
        transfers.measured(2.0, "p", "d", 1000, 4.0)
    assert transfers.seconds(2.0, "p", "d", 1000) == 4.0


def test_a_link_that_is_not_known_is_expected_to_be_as_the_others(transfers):
    met(transfers, ("p", "d"), ("p", "e"))
    transfers.measured(1.0, "p", "d", 1000, 2.0)
    assert transfers.seconds(1.0, "p", "e", 1000) == 2.0


def test_a_slow_link_is_tried_again_after_a_while(transfers):
    met(transfers, ("p", "d"))
    transfers.measured(1.0, "p", "d", 1000, 50.0)
    assert transfers.seconds(KEPT_S, "p", "d", 1000) == 50.0
    assert transfers.seconds(KEPT_S + 2, "p", "d", 1000) == 1000 / (SPEEDUP * 1000)


def test_an_engine_that_was_replaced_is_met_anew(transfers):
    met(transfers, ("p", "d"), ("q", "d"))
    transfers.forget("p")
    assert transfers.seconds(0.0, "p", "d", 0) == HANDSHAKE_S
    assert transfers.seconds(0.0, "q", "d", 0) == 0.0
