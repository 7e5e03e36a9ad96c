from proxy.core.index.expected import InFlight


def test_of_several_requests_the_one_that_waits_for_least_ends_first():
    flight = InFlight()
    for start in (2, 5, 0):
        flight.begin(9, start)
    assert [flight.end(9) for _ in range(4)] == [5, 2, 0, None]
    assert not flight.starts


def test_what_never_began_has_no_end():
    assert InFlight().end(9) is None


def test_a_block_goes_with_the_last_request_that_waits_for_it():
    flight = InFlight()
    flight.awaited.update([1, 2])
    flight.awaited.update([1])
    assert flight.last_of((1, 2, 3)) == (3,)
    assert flight.last_of((1, 2, 3)) == (2, 3)
    assert not flight.awaited
    assert flight.last_of((1, 2)) == (1, 2)
