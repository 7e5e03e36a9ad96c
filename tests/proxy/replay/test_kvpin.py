import pytest

from engine_adapter.types import Tier
from proxy.core.placement.demand import Rate
from proxy.replay.policy import TERMS, Kvpin
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


def queue(policy):
    """Engine 0 has one block of the prompt, and a long prompt to compute."""
    policy.stored(0, Tier.GPU, [1])
    policy.stored(0, Tier.GPU, [91])
    assert choose(policy, ask([*range(91, 97)], name=90))[0].engine == 0


def restore(policy):
    """Engine 0 has three blocks of the prompt in host memory, engine 1 on its GPU."""
    policy.stored(0, Tier.HOST, [1, 2, 3])
    policy.stored(1, Tier.GPU, [1, 2, 3])


def interference(policy):
    """Engine 0 has one block of the prompt, and six streams which slow it by a fifth each."""
    policy.stored(0, Tier.GPU, [1])
    for name in range(90, 96):
        choose(policy, ask((1,), tail=1, name=name))
        policy.first_token(0.0, 0, ask((1,), name=name))
    policy._placer.rates.interference = 0.2


def lost(policy):
    """Engine 0 has one block of the prompt, and no room left but by evicting what is often asked for."""
    policy.stored(0, Tier.GPU, [1])
    prompt = ask([1, *range(91, 100)], tail=0)
    assert answered(policy, prompt) == 0
    policy._placer.books["e0"].worked = Rate()  # that it is busy is another term
    policy._placer.demand._returns = [0.9] * len(policy._placer.demand._returns)


def congestion(policy):
    """Engine 0 has half of the prompt, and a little more to compute before it than that saves."""
    policy.stored(0, Tier.GPU, [1, 2])
    assert choose(policy, ask([1, 2, *range(93, 98)], tail=0, name=90))[0].engine == 0
    policy._placer.demand.utilisation = lambda *_: 0.9


def pending(policy):
    """Engine 0 is about to have the prompt, which it began to compute a moment ago. Engine 1 is busy, too."""
    assert choose(policy, ask([1, 2, 3, 4], tail=0, name=90))[0].engine == 0
    assert choose(policy, ask([91, 92, 93], tail=0, name=91))[0].engine == 1


# With the rule in full the prompt goes to engine 1, but for the last two terms, which draw it to engine 0.
@pytest.mark.parametrize(
    ("scene", "in_full"),
    [(queue, 1), (restore, 1), (interference, 1), (lost, 1), (congestion, 0), (pending, 0)],
)
def test_each_term_decides_and_can_be_left_out(scene, in_full):
    term, prompt = scene.__name__, ask([1, 2, 3, 4], tail=0, name=1)
    homes = {}
    for without in (None, term):
        policy = Kvpin(fleet_of(), 0, without=without)
        scene(policy)
        homes[without] = choose(policy, prompt, now=0.05)[0].engine
    assert homes == {None: in_full, term: 1 - in_full}
    assert term in TERMS


def test_an_ablation_keeps_its_books_by_the_full_rule():
    policy = Kvpin(fleet_of(), 0, without="restore")
    policy.stored(0, Tier.HOST, [1, 2, 3])
    (choice,) = choose(policy, ask((1, 2, 3)))
    assert choice == (0, 300)
    (prefill,) = policy._placer.books["e0"].ledger._prefills.values()
    assert prefill.work.host == 300


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


def test_of_a_hybrid_model_it_counts_what_all_groups_hold():
    policy = Kvpin(fleet_of(window_groups=2, window_tokens=101), 0)
    policy.stored(0, Tier.GPU, [1, 2])
    policy.window_stored(0, [1, 2])
    assert choose(policy, ask((1, 2))) == [(0, 200)]
    policy.window_removed(0, [2])
    policy.removed(0, Tier.GPU, [])
    assert policy._placer.match(ask((1, 2)).chain)["e0"].cut == 1


@pytest.mark.parametrize(("without", "second"), [(None, 0), ("again", 1)])
def test_of_a_hybrid_model_a_beginning_is_completed_where_a_prompt_left_it(without, second):
    policy = Kvpin(fleet_of(window_groups=2, window_tokens=101), 0, without=without)
    assert answered(policy, ask((1, 2, 3, 4))) == 0
    assert choose(policy, ask((1, 2, 3, 5), name=1), now=1.0) == [(second, 0)]


def test_on_hybrid_models_it_predicts_what_engines_reuse():
    trace = chats(30, 6, seed=1)
    model = EngineModel(30_000, window_groups=3, window_tokens=301)
    speedup = speedup_for_load(trace, model, 2, 0.5)
    own, other = (simulate(trace, ReplayRun(name, 2, model, speedup)) for name in ("kvpin", "llm-d"))
    assert own.evicted > 0
    assert own.exact_share > max(other.exact_share, 0.8)
    assert own.mean_ttft_s < other.mean_ttft_s
