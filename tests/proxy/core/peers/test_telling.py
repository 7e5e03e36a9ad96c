from proxy.core.index.blocks import Chain
from proxy.core.peers.messages import AnswerBegan, Begun, Heartbeat, Refined, RequestOver, packed
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
    assert begun == Begun(1, "a", packed([1, 2]), 40, Work(9), streams=True, known=True, session=5)
    assert rest == [Refined(1, Work(4)), AnswerBegan(1, 1), RequestOver(1, 4, None)]
    assert own.take() == []
    assert len(woken) == 1


def test_after_all_was_taken_the_next_message_wakes_again():
    own, woken = made()
    begin(own)
    own.take()
    begin(own, streams=False).answer_began(2)
    assert own.take()[1:] == [AnswerBegan(2, 2)]
    assert len(woken) == 2


def test_what_runs_is_told_as_it_is_now():
    own, _ = made()
    begin(own).ended(None, None)
    running, answered = begin(own), begin(own, Chain((3,), 16, 16))
    running.refined(Work(1))
    answered.answer_began(2)
    one, two, last = own.in_flight(5.0)
    assert (one.id, one.hashes, one.work, one.step, one.known) == (2, None, Work(1), 0, False)
    assert (two.id, two.hashes, two.work, two.step) == (3, packed([3]), Work(9), 2)
    assert last == own.heartbeat(5.0) == Heartbeat(packed([2, 3]), 5.0)
    running.answer_began(1)
    assert next(own.in_flight(5.0)).step == 1
