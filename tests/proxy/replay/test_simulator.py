import pytest

from proxy.replay.rules import ORACLE, POLICIES, resolve
from proxy.replay.simulated_engine import EngineModel
from proxy.replay.simulator import (
    JITTER_S,
    ReplayRun,
    RunResult,
    arrivals,
    oracle_hits,
    quantile_of,
    run_all,
    simulate,
    speedup_for_load,
)
from proxy.replay.trace import read_trace
from tests.proxy.replay.making import TRACES, ask, model_of, trace_of


@pytest.fixture(scope="module")
def agents():
    return read_trace(TRACES / "agents.jsonl.gz")


def busy(trace, policy, *, seed=0, engines=4, **options):
    model = EngineModel(150_000, **options)
    return simulate(
        trace, ReplayRun(policy, engines, model, speedup_for_load(trace, model, engines, 0.9), seed)
    )


def test_times_hits_and_work_of_a_little_trace():
    trace = trace_of(
        ask((1, 2)),  # engine 0: 0.25 s
        ask((7,)),  # engine 1: 0.15 s
        ask((1, 2, 3)),  # engine 0, after the first: 200 tokens are cached, 0.25 + 0.15 s
        ask((1, 2, 3), at=1.0),  # engine 1: nothing of it there, 0.35 s, and 7 has to go
    )
    outcome = simulate(trace, ReplayRun("round-robin", 2, model_of(4)))
    assert outcome.ttfts == pytest.approx([0.15, 0.25, 0.35, 0.40])
    assert (outcome.requests, outcome.prompt_tokens, outcome.gpu_hits) == (4, 1100, 200)
    assert (outcome.computed, outcome.evicted) == ([400, 500], 1)
    assert outcome.hit_share == pytest.approx(2 / 11)
    assert outcome.mean_ttft_s == pytest.approx(0.2875)
    assert (outcome.ttft_s(0.5), outcome.ttft_s(0.99)) == pytest.approx((0.25, 0.40))
    assert (outcome.imbalance, outcome.exact_share) == (pytest.approx(10 / 9), None)


def test_predictions_are_held_against_what_is_found():
    # When the last one is placed, the one before it waits, and is to evict block 2.
    trace = trace_of(ask((1, 2)), ask((1,), at=1.0), ask((7, 8), at=1.01), ask((1, 2), at=1.02))
    outcome = simulate(trace, ReplayRun("kvpin", 1, model_of(4)))
    assert (outcome.predicted, outcome.exact, outcome.exact_share) == (4, 3, 0.75)
    assert (outcome.gpu_hits, outcome.off_tokens) == (200, 25)


def test_what_fits_no_engine_is_left_out_and_counted():
    trace = trace_of(ask((1, 2, 3, 4)), ask((1,)), ask((2,), at=1.0))
    outcome = simulate(trace, ReplayRun("kvpin", 2, model_of(4)))
    assert (outcome.requests, outcome.too_long, outcome.prompt_tokens) == (2, 1, 300)
    with pytest.raises(ValueError, match="no request of the trace fits an engine"):
        simulate(trace, ReplayRun("kvpin", 2, model_of(1)))


@pytest.mark.parametrize("policy", resolve(["all"]))
@pytest.mark.parametrize("options", [{}, {"host_tokens": 300_000, "chunked": True}])
def test_every_policy_serves_every_request_and_wastes_none(agents, policy, options):
    outcome = busy(agents, policy, **options)
    assert outcome.requests == 200
    if policy == ORACLE:
        assert (outcome.ttfts, outcome.mean_ttft_s) == ((), None)
        assert (outcome.ttft_s(0.5), outcome.imbalance) == (None, None)
        return
    assert len(outcome.ttfts) == 200
    hits = outcome.gpu_hits + outcome.host_hits
    assert sum(outcome.computed) + hits == outcome.prompt_tokens
    assert (outcome.host_hits > 0) == bool(options)
    assert hits <= agents.n_tokens
    assert outcome.predicted == (200 if policy == "kvpin" else 0)


def test_the_same_run_has_the_same_outcome_and_another_seed_another(agents):
    for policy in ("kvpin", "least-loaded"):
        one, two, three = (busy(agents, policy, seed=seed) for seed in (1, 1, 2))
        assert one == two
        assert one.ttfts != three.ttfts


def test_no_policy_finds_more_than_the_oracle(agents):
    bound = busy(agents, ORACLE).hit_share
    shares = {policy: busy(agents, policy).hit_share for policy in POLICIES}
    assert max(shares.values()) <= bound
    assert shares["round-robin"] < shares["kvpin"]


@pytest.mark.parametrize(
    ("count", "share", "rank"),
    [(100, 0.99, 99), (100, 0.5, 50), (101, 0.5, 51), (1, 0.99, 1), (700, 0.07, 49)],
)
def test_a_quantile_is_the_least_that_so_many_do_not_exceed(count, share, rank):
    values = list(range(1, count + 1))
    assert quantile_of(values, share) == rank
    outcome = RunResult(ReplayRun("kvpin", 1, model_of()), count, 0, 1, 0, 0, ttfts=values)
    assert outcome.ttft_s(share) == rank


def test_a_run_that_leaves_requests_unserved_is_none():
    for_ever = model_of(20_000, prefill_tok_s=1e-303)
    trace = trace_of(ask((1,)), ask((2,), tail=10**6))  # of which one takes longer than there are numbers
    with pytest.raises(RuntimeError, match="round-robin: of 2 requests 1 were served"):
        simulate(trace, ReplayRun("round-robin", 2, for_ever))


def test_the_least_recently_used_goes_and_host_tiers_are_room_too():
    prompts = [ask((1, 2)), ask((7, 8)), ask((1, 2))]
    assert oracle_hits(prompts, 1, model_of(3)) == 100
    assert oracle_hits(prompts, 1, model_of(3, host=1)) == 200


def test_the_last_token_is_computed():
    assert oracle_hits([ask((1, 2), tail=0)] * 2, 1, model_of(4)) == 100


def test_processes_come_to_the_same():
    trace = read_trace(TRACES / "agents.jsonl.gz")
    runs = [ReplayRun(policy, 2, EngineModel(200_000), 4.0) for policy in ("kvpin", "sticky", "oracle")]
    alone, beside = [], []
    here = run_all(trace, runs, progress=alone.append)
    assert run_all(trace, runs, jobs=2, progress=beside.append) == here
    assert [outcome.run for outcome in here] == runs
    assert sum(alone) == sum(beside) == 600


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
