from proxy.core.peers.messages import Heard
from proxy.core.peers.round_trip import RoundTrip


def test_a_round_trip_is_measured_by_the_own_clock_alone():
    here, there = RoundTrip(), RoundTrip()
    assert there.answer(0.0, 1) is None
    there.heard(5001.0, sent=10.0)  # of its clock, and of this one
    answer = there.answer(5001.7, 1)
    assert (answer.of, answer.sent) == (1, 10.0)
    here.measure(10.9, answer)
    assert here.seconds is None
    here.measure(10.9, answer)
    assert round(here.seconds, 3) == 0.2


def test_several_long_trips_in_succession_are_a_delay():
    trip = RoundTrip()
    for seconds, is_behind in ((0.1, False), (2.0, False), (2.1, True), (0.2, False), (1.9, False)):
        trip.measure(100.0 + seconds, Heard(1, 99.0, 1.0))
        assert trip.is_behind is is_behind
