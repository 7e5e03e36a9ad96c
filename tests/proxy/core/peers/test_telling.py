from msgspec.structs import replace

from proxy.core.index.blocks import Chain
from proxy.core.peers.messages import Heartbeat, Placing, RequestState, packed
from proxy.core.peers.telling import OwnRequests
from proxy.core.placement.load import Work


def made():
    woken = []
    own = OwnRequests(lambda: woken.append(1))
    return own, woken


def begin(own, chain=None, **more):
    return own.begun("a", Work(9), chain, **{"streams": True, "known": True, "session": 5, **more})


def test_a_request_is_told_from_its_begin_to_its_end():
    own, woken = made()
    telling = begin(own, Chain((1, 2), 40, 16))
    telling.refined(Work(4))
    telling.answer_began(1)
    telling.ended(4, None)
    begun, *rest = own.take()
    placing = Placing("a", packed([1, 2]), 40, streams=True, known=True, session=5)
    assert begun == RequestState(1, Work(9), placing=placing)
    assert rest == [
        RequestState(1, Work(4)),
        RequestState(1, Work(4), 1),
        RequestState(1, Work(4), 3, computed=4),
    ]
    assert own.take() == []
    assert len(woken) == 1


def test_after_all_was_taken_the_next_message_wakes_again():
    own, woken = made()
    begin(own)
    own.take()
    begin(own, streams=False).answer_began(2)
    assert own.take()[1:] == [RequestState(2, Work(9), 2)]
    assert len(woken) == 2


def test_what_runs_is_told_as_it_is_now():
    own, _ = made()
    begin(own).ended(None, None)
    running, answered = begin(own), begin(own, Chain((3,), 16, 16))
    running.refined(Work(1))
    answered.answer_began(2)
    one, two, last = own.in_flight(5.0)
    untimed = Placing("a", None, 0, streams=True, known=False, session=5)
    assert one == RequestState(2, Work(1), 0, untimed)
    assert two == RequestState(3, Work(9), 2, replace(untimed, hashes=packed([3]), n_tokens=16))
    assert last == own.heartbeat(5.0) == Heartbeat(packed([2, 3]), 5.0)
    running.answer_began(1)
    assert next(own.in_flight(5.0)).step == 1
