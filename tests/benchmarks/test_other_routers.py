from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.types import Tier
from proxy.core.placement.demand import Rate
from proxy.replay import rules
from proxy.replay.simulated_engine import SimEngine
from proxy.replay.simulator import ReplayRun, run_all, simulate, speedup_for_load
from proxy.replay.trace import read_trace
from tests.proxy.replay.making import SIZE, TRACES, Diary, ask, chats, fleet_of, model_of, play
from tests.proxy.replay.test_simulated_engine import REQUESTS


def choose(policy, *requests, now=0.0):
    return [policy.choose(now, request, ()).engine for request in requests]


class TestBoundedHash:
    def test_prompts_are_spread_evenly(self, script):
        policy, owned = script.BoundedHash(fleet_of(4), 0), Counter()
        for key in range(2000):
            owned.update(choose(policy, ask((key,))))
            policy.in_flight = [0] * 4
        assert 350 < min(owned.values()) <= max(owned.values()) < 650

    def test_the_bound_is_a_quarter_over_the_mean(self, script):
        policy = script.BoundedHash(fleet_of(4), 0)
        (home,) = choose(policy, ask((1,)))
        # With this one 16 in flight, 4 on average: an engine takes a fifth, and no sixth.
        policy.in_flight = [4 if at == home else 11 / 3 for at in range(4)]
        assert choose(policy, ask((1,))) == [home]
        policy.in_flight = [5 if at == home else 10 / 3 for at in range(4)]
        assert choose(policy, ask((1,))) != [home]


def loaded(policy, home, here, there=0):
    """So many requests are in flight on one of two engines and on the other."""
    policy.in_flight[home], policy.in_flight[1 - home] = here, there


class TestSglang:
    @pytest.fixture
    def policy(self, script):
        return script.SglangCacheAware(fleet_of(), 0)

    @pytest.mark.parametrize(
        ("blocks", "stays"),
        [((1, 2, 3, *range(4, 10)), True), ((1, 2, 3, *range(14, 21)), False)],
        ids=["3 of 9", "3 of 10"],
    )
    def test_more_than_three_tenths_of_the_prompt_draw(self, policy, blocks, stays):
        (home,) = choose(policy, ask((1, 2, 3), tail=0))
        loaded(policy, home, 5)
        assert (choose(policy, ask(blocks, tail=0)) == [home]) is stays

    @pytest.mark.parametrize(
        ("here", "there", "stays"), [(64, 0, True), (65, 0, False), (195, 130, True), (196, 130, False)]
    )
    def test_more_than_64_and_half_as_many_again_release(self, policy, here, there, stays):
        (home,) = choose(policy, ask((1, 2)))
        loaded(policy, home, here, there)
        assert (choose(policy, ask((1, 2))) == [home]) is stays

    def test_any_of_those_it_was_sent_to_is_drawn(self, script):
        policy = script.SglangCacheAware(fleet_of(3), 0)
        (home,) = choose(policy, ask((1, 2)))
        policy.in_flight = [100, 100, 100]
        policy.in_flight[home - 1] = 0
        assert choose(policy, ask((1, 2))) == [(home - 1) % 3]
        policy.in_flight = [0, 0, 0]
        assert set(choose(policy, *[ask((1, 2))] * 30)) == {home, (home - 1) % 3}

    def test_what_matches_nothing_goes_to_the_least_loaded_of_several_the_smallest_tree(self, policy):
        (home,) = choose(policy, ask((1, 2, 3)))
        for block, load, expected in ((7, 0, 1 - home), (8, 0, 1 - home), (9, 1, home)):
            loaded(policy, home, 0, load)
            assert choose(policy, ask((block,))) == [expected]

    def test_it_does_not_see_evictions_and_has_a_bound_of_its_own(self, script, monkeypatch):
        monkeypatch.setattr(script.SglangCacheAware, "MAX_TREE_CHARS", 3 * 400)
        policy = script.SglangCacheAware(fleet_of(), 0)
        (home,) = choose(policy, ask((1, 2)))
        policy.removed(home, Tier.GPU, [1, 2])
        loaded(policy, home, 5)
        assert choose(policy, ask((1, 2, 3)), now=119.0) == [home]
        loaded(policy, home, 0, 5)
        choose(policy, ask((7, 8)), now=119.5)
        # Five blocks in a tree for three: at 120 s the oldest two go, which are 3 and 2.
        loaded(policy, home, 5)
        assert choose(policy, ask((1, 2, 3), tail=99), now=120.0) == [1 - home]

    def test_what_one_engine_forgets_another_may_know(self, script, monkeypatch):
        monkeypatch.setattr(script.SglangCacheAware, "MAX_TREE_CHARS", 2 * 400)
        policy = script.SglangCacheAware(fleet_of(), 0)
        (home,) = choose(policy, ask((1, 2)))
        loaded(policy, home, 100)
        choose(policy, ask((1, 2)))
        loaded(policy, home, 5)
        assert choose(policy, ask((3, 4))) == [1 - home]
        loaded(policy, home, 0, 5)
        assert choose(policy, *[ask((1, 2))] * 5, now=120.0) == [home] * 5


class TestLlmd:
    @pytest.mark.parametrize(
        ("gpu", "host", "tail", "tokens", "kept"),
        [
            (8, 0, 0, 1000, True),  # four fifths of the prompt
            (7, 0, 0, 1000, False),
            (0, 10, 1, 1500, False),  # in host memory, each counts for four fifths; the last token is nowhere
            (1, 9, 1, 1500, True),
            (10, 0, 0, 18_000, True),  # 18 s more in flight
            (10, 0, 0, 18_001, False),
        ],
    )
    def test_an_engine_is_kept_for_what_it_holds_and_released_for_its_load(
        self, script, gpu, host, tail, tokens, kept
    ):
        policy = script.LlmdDefault(fleet_of(), 0)
        policy.stored(0, Tier.GPU, range(gpu))
        policy.stored(0, Tier.HOST, range(gpu, gpu + host))
        policy._tokens = [tokens, 0]
        assert (choose(policy, ask(range(10), tail=tail)) == [0]) is kept

    def test_otherwise_the_fewest_uncached_tokens(self, script):
        policy = script.LlmdDefault(fleet_of(), 0)
        policy.stored(1, Tier.GPU, [1, 2])
        assert choose(policy, ask((1, 2, 3, 4, 5))) == [1]
        policy._tokens = [0, 201]
        assert choose(policy, ask((1, 2, 8, 9, 10))) == [0]

    def test_a_burst_of_one_prefix_gathers_until_its_first_token(self, script):
        policy = script.LlmdDefault(fleet_of(), 0)
        prompts = [ask(range(9), tail=0, name=name) for name in range(5)]
        ((home, _),) = Counter(choose(policy, *prompts)).items()
        assert policy._tokens[home] > 0
        for prompt in prompts:
            policy.first_token(0.1, home, prompt)
        assert policy._tokens == [0, 0]
        assert policy.matches(prompts[0].chain)[home].blocks == 0


class TestDynamo:
    @pytest.fixture
    def policy(self, script):
        return script.DynamoLike(fleet_of(), 0)

    def test_prefill_beyond_the_overlap_and_blocks_in_use(self, policy):
        policy.stored(1, Tier.GPU, [1, 2])
        assert choose(policy, ask((1, 2, 3), tail=0)) == [1]
        # In flight there: a block of prefill and three in use, as much as is cached is not enough.
        assert choose(policy, ask((1, 2, 8), tail=0, name=1)) == [1]
        assert choose(policy, ask((1, 2, 9), tail=0, name=2)) in ([0], [1])

    @pytest.mark.parametrize(("tier", "blocks"), [(Tier.GPU, 4), (Tier.HOST, 3), (Tier.DISK, 1)])
    @pytest.mark.parametrize(("more", "home"), [(-1, 0), (1, 1)])
    def test_credits_by_tier(self, policy, tier, blocks, more, home):
        policy.stored(0, tier, [1, 2, 3, 4])
        policy._prefill = [100 * blocks + more, 0]
        assert choose(policy, ask((1, 2, 3, 4))) == [home]

    def test_blocks_that_running_requests_share_count_once(self, policy):
        request = ask((1, 2, 3), tail=0)
        (home,) = choose(policy, request)
        assert policy._in_use(home, (1, 2, 9)) == 4
        policy.first_token(0.1, home, request)
        assert (policy._prefill, policy._in_use(home, (1, 2, 9))) == ([0, 0], 4)
        policy.finished(0.2, home, request)
        assert policy._in_use(home, (1, 2, 9)) == 3

    def test_no_credit_beyond_the_prompt(self, policy):
        policy.stored(0, Tier.GPU, [1])
        policy._prefill = [-500, 0]
        assert choose(policy, ask((1,), tail=0)) == [0]
        assert policy._prefill[0] == 0


class TestMinTtft:
    def test_who_answers_first_and_of_equals_whom_holds_least(self, script):
        engines = [SimEngine(at, model_of(), SIZE, Diary()) for at in range(2)]
        engines[0].submit(0.0, ask((7, 8)))
        policy = script.MinTtft(fleet_of(), 0)
        assert policy.choose(0.1, ask((1, 2)), engines) == (1, 0)
        engines[1].submit(0.1, ask((9,)))
        for engine in engines:
            engine.advance(engine.due)
        assert policy.choose(1.0, ask((1, 2)), engines) == (1, 0)

    def test_restores_of_what_waits(self, script):
        engine, _ = play(model_of(5, host=10, restore_tok_s=100.0), ask((1, 2)), ask((7, 8, 9), name=2))
        now = 10.0
        engine.submit(now, ask((21, 22), tail=0, name=3))
        engine.submit(now, ask((1, 2), name=4))
        # 0.2 s for the first, then 200 tokens from host memory and 50 to compute; the prompt's own last.
        fresh, known = ask((31,), tail=0).chain, ask((1, 2)).chain
        assert script.foresee(engine, now, fresh) == (pytest.approx(0.2 + 2.05 + 0.1), 0)
        assert script.foresee(engine, now, known) == (pytest.approx(0.2 + 2.05 + 0.05), 200)


@given(REQUESTS, st.sampled_from([0, 500]))
def test_what_is_foreseen_holds_where_nothing_is_evicted(requests, context_tokens):
    from other_routers import foresee

    diary = Diary()
    engine = SimEngine(0, model_of(80, context_tokens=context_tokens), SIZE, diary)
    foreseen = {}
    for request in requests:
        while engine.due <= request.at:
            engine.advance(engine.due)
        foreseen[request.id] = foresee(engine, request.at, request.chain)
        engine.submit(request.at, request)
    while engine.due < float("inf"):
        engine.advance(engine.due)
    cached = {name: gpu + below for _, _, name, gpu, below in diary.of("started")}
    first = {name: now for _, now, name in diary.of("first")}
    for request in requests:
        seconds, tokens = foreseen[request.id]
        assert first[request.id] - request.at == pytest.approx(seconds, abs=1e-5)
        assert cached[request.id] == tokens


def test_every_policy_serves_every_request(script):
    trace = read_trace(TRACES / "agents.jsonl.gz", limit=60)
    for model in (model_of(1500), model_of(1500, host=3000, chunked=True)):
        names = [*rules.resolve(["all"]), *script.ABLATIONS]
        rules.POLICIES.update(script.ABLATIONS)
        speedup = speedup_for_load(trace, model, 4, 0.9)
        for outcome in run_all(trace, [ReplayRun(name, 4, model, speedup) for name in names]):
            assert outcome.requests == 60
            if outcome.run.policy != rules.ORACLE:
                hits = outcome.gpu_hits + outcome.host_hits
                assert sum(outcome.computed) + hits == outcome.prompt_tokens


# --- kvpin with a term left out -------------------------------------------------------------------------


def answered(policy, request, now=0.0):
    """The request served without a wait; returns where."""
    (engine,) = choose(policy, request, now=now)
    policy.stored(engine, Tier.GPU, request.chain.hashes)
    policy.first_token(now + 0.3, engine, request)
    policy.finished(now + 0.3, engine, request)
    return engine


def queue(policy):
    """Engine 0 has one block of the prompt, and a long prompt to compute."""
    policy.stored(0, Tier.GPU, [1])
    policy.stored(0, Tier.GPU, [91])
    assert choose(policy, ask([*range(91, 97)], name=90))[0] == 0


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
    assert choose(policy, ask([1, 2, *range(93, 98)], tail=0, name=90))[0] == 0
    policy._placer.demand.utilisation = lambda *_: 0.9


def pending(policy):
    """Engine 0 is about to have the prompt, which it began to compute a moment ago. Engine 1 is busy, too."""
    assert choose(policy, ask([1, 2, 3, 4], tail=0, name=90))[0] == 0
    assert choose(policy, ask([91, 92, 93], tail=0, name=91))[0] == 1


# With the rule in full the prompt goes to engine 1, but for the last two terms, which draw it to engine 0.
@pytest.mark.parametrize(
    ("scene", "in_full"),
    [(queue, 1), (restore, 1), (interference, 1), (lost, 1), (congestion, 0), (pending, 0)],
)
def test_each_term_decides_and_can_be_left_out(script, scene, in_full):
    term, prompt = scene.__name__, ask([1, 2, 3, 4], tail=0, name=1)
    homes = {}
    for without in (None, term):
        policy = script.AnyKvpin(fleet_of(), 0, without=without)
        scene(policy)
        homes[without] = choose(policy, prompt, now=0.05)[0]
    assert homes == {None: in_full, term: 1 - in_full}
    assert term in script.TERMS


# --- hybrid models --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("without", "second"), [(None, 0), ("again", 1)])
def test_a_beginning_is_completed_where_a_prompt_left_it(script, without, second):
    model = script.HybridModel(1000, prefill_tok_s=1000.0, window_groups=2, window_tokens=101)
    policy = script.AnyKvpin(replace(fleet_of(), model=model), 0, without=without)
    assert answered(policy, ask((1, 2, 3, 4))) == 0
    assert policy.choose(1.0, ask((1, 2, 3, 5), name=1), ()) == (second, 0)


def test_it_predicts_what_engines_reuse(script):
    trace = chats(30, 6, seed=1)
    model = script.HybridModel(30_000, window_groups=3, window_tokens=301)
    speedup = speedup_for_load(trace, model, 2, 0.5)
    own, other = (simulate(trace, ReplayRun(name, 2, model, speedup)) for name in ("kvpin", "llm-d"))
    assert own.evicted > 0
    assert own.exact_share > max(other.exact_share, 0.8)
    assert own.mean_ttft_s < other.mean_ttft_s
