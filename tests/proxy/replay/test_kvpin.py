from engine_adapter.types import Tier
from proxy.replay.policy import Kvpin
from proxy.replay.rules import POLICIES
from proxy.replay.simulated_engine import EngineModel
from proxy.replay.simulator import ReplayRun, simulate, speedup_for_load
from tests.proxy.replay.making import ask, chats, fleet_of


def choose(policy, *requests, now=0.0):
    return [policy.choose(now, request, ()) for request in requests]


def answered(policy, request, now=0.0):
    """The request served without a wait; returns where."""
    choice = choose(policy, request, now=now)[0]
    policy.stored(choice.engine, Tier.GPU, request.chain.hashes)
    policy.first_token(now + 0.3, choice.engine, request)
    policy.finished(now + 0.3, choice.engine, request)
    return choice.engine


def test_everything_it_takes_it_gives_back():
    policy = Kvpin(fleet_of(), 0)
    for name in range(5):
        answered(policy, ask((1, 2, name), name=name), now=float(name))
    placer = policy._placer
    assert [placer.index.pending(name) for name in ("e0", "e1")] == [0, 0]
    assert [book.ledger.in_flight for book in placer.books.values()] == [0, 0]
    assert not policy._placed


def test_engines_that_decode_and_have_no_room_teach_it_no_slow_restores(monkeypatch):
    """Prompts there wait for room, and share steps with streams: neither is a slowness of host memory."""
    made = []

    def remembered(fleet, seed):
        made.append(Kvpin(fleet, seed))
        return made[-1]

    monkeypatch.setitem(POLICIES, "kvpin", remembered)
    trace = chats(60, 12, seed=1)
    model = EngineModel(120_000, 480_000, chunked=True)
    speedup = speedup_for_load(trace, model, 4, 0.9)
    own, in_turn = (simulate(trace, ReplayRun(name, 4, model, speedup)) for name in ("kvpin", "round-robin"))
    assert own.mean_ttft_s < in_turn.mean_ttft_s
    assert own.hit_share > in_turn.hit_share
    learned = made[0]._placer.rates.restore_tok_s(Tier.HOST)
    assert model.restore_tok_s / 2 < learned < model.restore_tok_s * 2
    assert own.host_hits > 0.2 * own.prompt_tokens


def test_events_reach_its_index():
    policy = Kvpin(fleet_of(), 0)
    policy.stored(0, Tier.HOST, [1, 2])
    policy.stored(0, Tier.GPU, [1])
    policy.removed(0, Tier.HOST, [2])
    assert choose(policy, ask((1, 2))) == [(0, 100)]
