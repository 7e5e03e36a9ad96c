import pytest

from proxy.replay.simulator import JITTER_S, arrivals, speedup_for_load
from proxy.replay.trace import read_trace
from tests.proxy.replay.making import TRACES, ask, model_of, trace_of


def test_a_load_is_what_computing_everything_would_take():
    trace = trace_of(ask((1, 2), tail=0, at=5.0), ask((1, 2), tail=0, at=25.0))
    # 0.4 s of work for 20 s: two engines are busy for half of the time when it takes 0.4 s.
    assert speedup_for_load(trace, model_of(), 2, 0.5) == pytest.approx(50)
    assert speedup_for_load(trace, model_of(context_tokens=100), 2, 0.5) == pytest.approx(25)


@pytest.mark.parametrize("speedup", [1e-320, 1e-9])
def test_nobody_waits_for_30_years(speedup):
    with pytest.raises(ValueError, match=f"^at {speedup:g} times the pace .* more than 30 years"):
        arrivals(trace_of(ask((1,)), ask((2,), at=1.1)), speedup, 0)


def test_seed_0_is_the_trace_as_it_is():
    trace = trace_of(ask((1,), at=10.0), ask((2,), at=14.0), ask((3,), at=14.0))
    timed = arrivals(trace, 2.0, 0)
    assert [(at, request.id) for at, request in timed] == [(0.0, 0), (2.0, 1), (2.0, 2)]


def test_other_seeds_move_arrivals_a_little():
    trace = trace_of(*(ask((n,), at=n / 2) for n in range(200)))
    one, two = arrivals(trace, 1.0, 1), arrivals(trace, 1.0, 2)
    assert one == arrivals(trace, 1.0, 1) != two
    assert [at for at, _ in one] == sorted(at for at, _ in one)
    moves = [at - request.at for at, request in one]
    assert all(-JITTER_S <= move <= JITTER_S for move in moves)
    assert min(moves) < -JITTER_S / 2 < JITTER_S / 2 < max(moves)
    assert [request.id for _, request in one] != list(range(200))
    assert one[0][0] >= 0


def test_the_turns_of_a_session_stay_in_order():
    trace = trace_of(*(ask((1,), at=n / 4, session=str(n % 3)) for n in range(60)))
    for seed in range(1, 5):
        for session in "012":
            turns = [request.id for _, request in arrivals(trace, 1.0, seed) if request.session == session]
            assert turns == sorted(turns)


def test_what_goes_on_from_an_earlier_request_stays_after_it():
    # Three conversations of which nothing is said but their blocks, and one of nothing that not all share.
    turns = [(99, *((n % 3) * 1000 + block for block in range(n // 3 + 1))) for n in range(60)]
    trace = trace_of(*(ask(blocks, at=n / 4) for n, blocks in enumerate([(99,), *turns])), common=1)
    moved = 0
    for seed in range(1, 5):
        order = [request.id for _, request in arrivals(trace, 1.0, seed)]
        for conversation in range(3):
            own = [at for at in order if at and (at - 1) % 3 == conversation]
            assert own == sorted(own)
        moved += order != sorted(order)
    assert moved == 4


def test_no_turn_of_a_real_conversation_comes_before_the_one_it_continues():
    trace = read_trace(TRACES / "conversation.jsonl.gz")
    ends, pairs = {}, []
    for request in trace.requests:
        own = request.chain.hashes[trace.common_blocks :]
        pairs += [(ends[block], request.id) for block in own if block in ends]
        if own:
            ends[own[-1]] = request.id
    assert len(pairs) > 10
    for seed in range(1, 4):
        place = {request.id: at for at, (_, request) in enumerate(arrivals(trace, 20.0, seed))}
        assert all(place[before] < place[after] for before, after in pairs)
