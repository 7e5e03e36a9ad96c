from array import array
from dataclasses import replace

import pytest
import structlog

from engine_adapter import BlocksStored, Capability, Forecast, Tier
from proxy.core.index import Match
from proxy.engine import ASSUMED_CAPACITY_TOKENS, EngineState
from proxy.errors import Conflict, NoEngine, NotFound
from proxy.fleet import Fleet, Pool
from proxy.prompt import Prompt
from tests.fakes import INFO, FakeAdapter, add_ready

PROMPT = Prompt(array("i", range(40)))


@pytest.fixture
def fleet():
    return Fleet()


class TestAdapters:
    """LoRA adapters: clients name them as models."""

    @pytest.fixture
    def engines(self, fleet):
        return (
            add_ready(fleet, "a", adapters=frozenset({"ada"})),
            add_ready(fleet, "b"),
            add_ready(fleet, "n", model="n"),
        )

    def test_one_is_found_in_the_pool_of_its_model(self, fleet, engines):
        pool = fleet.pool("ada")
        assert (pool.model, pool.adapter_of("ada"), pool.adapter_of("m")) == ("m", "ada", None)
        assert fleet.served() == {"m": "m", "n": "n", "ada": "m"}
        with pytest.raises(NotFound, match="'lin' does not exist; served: ada, m, n") as caught:
            fleet.pool("lin")
        assert (caught.value.param, caught.value.code) == ("model", "model_not_found")

    def test_only_engines_that_serve_it_are_candidates(self, fleet, engines):
        pool = fleet.pool("ada")
        prompt = replace(PROMPT, adapter="ada")
        chain = pool.chain(prompt)
        pool.index.store("b", Tier.GPU, chain.hashes)  # a hash is a hash; nobody could have put it there
        for candidates in (pool.candidates(chain, prompt), pool.candidates(None, adapter="ada")):
            assert [candidate.engine for candidate in candidates] == ["a"]
        assert len(pool.candidates(None)) == 2

    def test_its_chain_is_its_own_under_each_salt(self, fleet, engines):
        pool = fleet.pool("m")
        prompts = [
            replace(PROMPT, adapter=a, salt=s) for a in (None, "ada", "lin") for s in (None, "ada", "s")
        ]
        assert len({pool.chain(prompt).hashes for prompt in prompts}) == len(prompts)

    def test_it_is_waited_for_while_its_engine_is_lost_and_forgotten_with_it(self, fleet, engines):
        engine = engines[0]
        fleet.leave(engine)
        assert fleet.pool("ada").candidates(None, adapter="ada") == []
        fleet.join(engine, replace(INFO, adapters=frozenset({"lin"})))
        assert sorted(fleet.served()) == ["lin", "m", "n"]
        fleet.leave(engine)
        fleet.remove("a")
        assert sorted(fleet.served()) == ["m", "n"]

    @pytest.mark.parametrize("adapter_first", [True, False])
    def test_a_model_wins_over_an_adapter_of_its_name_and_that_is_told_once(self, fleet, adapter_first):
        with structlog.testing.capture_logs() as logs:
            if not adapter_first:
                add_ready(fleet, "n", model="x")
            add_ready(fleet, "a", adapters=frozenset({"x"}))
            if adapter_first:
                add_ready(fleet, "n", model="x")
            add_ready(fleet, "b", adapters=frozenset({"x"}))
        assert [(log["adapter"], log["parent"]) for log in logs] == [("x", "m")]
        assert (fleet.pool("x").model, fleet.pool("x").adapter_of("x")) == ("x", None)
        assert fleet.served() == {"m": "m", "x": "x"}


class TestPools:
    def test_engines_of_one_model_share_a_pool(self, fleet):
        add_ready(fleet, "a"), add_ready(fleet, "b"), add_ready(fleet, "c", model="alias")
        assert {model: list(pool.engines) for model, pool in fleet.pools.items()} == {
            "m": ["a", "b"],
            "alias": ["c"],
        }

    @pytest.mark.parametrize(
        ("own", "pools"), [(None, 16), (64, 16), (16, 16), (8, 8), (4, 4), (2, 16), (1, 16)]
    )
    def test_blocks_are_16_tokens_or_the_engines_smaller_ones_unless_those_are_pages(self, fleet, own, pools):
        add_ready(fleet, "a", tokens_per_block=own)
        assert fleet.pools["m"].tokens_per_block == pools

    def test_an_engine_that_comes_back_with_other_blocks_gets_another_pool(self, fleet):
        engine = add_ready(fleet, "a")
        fleet.leave(engine)
        fleet.join(engine, replace(INFO, tokens_per_block=4))
        assert fleet.pools["m"].tokens_per_block == 4

    def test_a_pool_outlives_an_outage_but_not_the_removal_of_its_last_engine(self, fleet):
        engine = add_ready(fleet, "a")
        pool = fleet.pools["m"]
        fleet.leave(engine)
        assert fleet.pool("m") is pool
        assert fleet.join(engine, INFO) is pool
        fleet.remove("a")
        assert fleet.pools == {}

    def test_an_engine_that_is_removed_while_down_takes_no_pool_along(self, fleet):
        add_ready(fleet, "a")
        down = fleet.add(FakeAdapter("b"))
        assert fleet.remove("b") is down
        assert list(fleet.pools) == ["m"]

    def test_a_pool_waits_for_engines_that_are_lost_and_ends_with_the_last_of_them(self, fleet):
        a, b = add_ready(fleet, "a"), add_ready(fleet, "b")
        fleet.leave(a)
        fleet.remove("b")
        assert b.id not in fleet.engines
        assert list(fleet.pools) == ["m"]
        fleet.remove("a")
        assert fleet.pools == {}

    def test_one_that_comes_back_with_another_model_leaves_its_pool(self, fleet):
        engine = add_ready(fleet, "a")
        fleet.leave(engine)
        fleet.join(engine, replace(INFO, model="n"))
        assert list(fleet.pools) == ["n"]

    def test_ids_are_unique_and_unknown_ones_are_named(self, fleet):
        add_ready(fleet, "a")
        with pytest.raises(Conflict) as conflict:
            fleet.add(FakeAdapter("a"))
        assert conflict.value.param == "id"
        with pytest.raises(NotFound, match="'x'; known: a"):
            fleet.engine("x")

    def test_the_pool_of_a_request(self, fleet):
        with pytest.raises(NoEngine):
            fleet.pool("m")
        with pytest.raises(NoEngine):
            fleet.pool(None)
        add_ready(fleet, "a")
        assert fleet.pool(None).model == fleet.pool("m").model == "m"
        add_ready(fleet, "b", model="n")
        for name in (None, "x"):
            with pytest.raises(NotFound, match="served: m, n") as missing:
                fleet.pool(name)
            assert (missing.value.code, missing.value.param) == ("model_not_found", "model")

    def test_ready_means_any_is_and_none_is_starting(self, fleet):
        assert not fleet.is_ready()
        one, two = add_ready(fleet, "a"), add_ready(fleet, "b")
        assert fleet.is_ready()
        two.state = EngineState.DOWN
        assert fleet.is_ready()
        two.state = EngineState.CONNECTING
        assert not fleet.is_ready()
        one.state = two.state = EngineState.DRAINING
        assert not fleet.is_ready()


class TestTokenisers:
    def test_those_that_tokenise_are_asked_while_they_are_ready(self, fleet):
        add_ready(fleet, "a")
        able, ill = (add_ready(fleet, name, capabilities=frozenset({Capability.TOKENIZE})) for name in "bc")
        ill.state = EngineState.SUSPECT
        assert fleet.pools["m"].tokenisers() == [able.adapter]
        able.info = replace(able.info, capabilities=frozenset({Capability.RENDER}))
        assert (fleet.pools["m"].tokenisers(), fleet.pools["m"].renderers()) == ([], [able.adapter])


class TestCandidates:
    def test_say_what_placement_needs(self, fleet):
        add_ready(fleet, "a", tokens_per_block=64, gpu_blocks=10)
        down, gone = add_ready(fleet, "b"), add_ready(fleet, "c")
        add_ready(fleet, "d", tokens_per_block=None, gpu_blocks=None)
        down.state = EngineState.DOWN
        pool = fleet.pools["m"]
        chain = pool.chain(PROMPT)
        pool.index.store("a", Tier.GPU, chain.hashes)
        a, d = pool.candidates(chain, without={gone.id})
        assert (a.engine, a.tokens_per_block, a.match, a.free_blocks) == ("a", 64, Match(gpu=2), 38)
        assert (d.engine, d.tokens_per_block, d.match, d.free_blocks) == ("d", 16, Match(), None)
        assert pool.candidates(None)[0].match == Match()

    def test_what_an_adapter_foresees_of_the_prompt_is_among_it(self, fleet):
        engine, asked = add_ready(fleet, "a"), []
        add_ready(fleet, "b")

        def forecast(target):
            asked.append(target)
            return Forecast(7)

        engine.adapter.forecast = forecast
        pool = fleet.pools["m"]
        salted = Prompt(PROMPT.token_ids, None, "s")
        a, b = pool.candidates(pool.chain(salted), salted)
        assert (a.forecast, b.forecast) == (Forecast(7), None)
        assert [(target.token_ids, target.cache_salt) for target in asked] == [(PROMPT.token_ids, "s")]
        assert pool.candidates(None)[0].forecast is None
        assert len(asked) == 1, "nothing is foreseen of a prompt that is not known"

    def test_nothing_is_foreseen_of_a_prompt_that_is_known_in_part(self, fleet):
        leasing, _ = add_ready(fleet, "a"), add_ready(fleet, "b")
        leasing.adapter.forecast = lambda target: Forecast(7)
        pool, part = fleet.pools["m"], replace(PROMPT, whole=False)
        chain = pool.chain(part)
        for name in "ab":
            pool.index.store(name, Tier.GPU, chain.hashes)
        a, b = pool.candidates(chain, part)
        # Who leases its slots reuses nothing for it; others do, and maybe more than that.
        assert (a.forecast, a.match, a.complete) == (None, Match(), False)
        assert (b.forecast, b.match, b.complete) == (None, Match(gpu=len(chain.hashes)), False)

    def test_one_that_is_lost_or_finishes_what_it_has_is_none(self, fleet):
        engines = [add_ready(fleet, name) for name in "abcde"]
        pool = fleet.pools["m"]
        chain = pool.chain(PROMPT)
        for engine, state in zip(engines, EngineState, strict=True):
            pool.index.store(engine.id, Tier.GPU, chain.hashes)  # it would be the best of all
            engine.state = state
        assert {engine.state for engine in engines} == set(EngineState)
        for prompt in (None, PROMPT):
            (only,) = pool.candidates(pool.chain(prompt), prompt)
            assert fleet.engines[only.engine].state is EngineState.READY


class TestRoots:
    def test_salts_have_roots_of_their_own_and_are_remembered(self):
        pool = Pool("m", 16)
        assert pool.root_of(None) != pool.root_of("a") != pool.root_of("b")
        assert pool.salts() == ["a", "b"]

    def test_salts_that_clients_invent_do_not_fill_memory(self):
        pool = Pool("m", 16)
        first = pool.root_of("0")
        for n in range(10_010):
            pool.root_of(str(n))
        assert len(pool._roots) < 100
        assert pool.root_of("0") == first

    def test_no_prompt_has_no_chain(self):
        assert Pool("m", 16).chain(None) is None


class TestLearning:
    async def test_forgets_what_the_capacity_cannot_hold(self, fleet):
        engine = add_ready(fleet, "a", gpu_blocks=3)
        pool = fleet.pools["m"]
        pool.learn(engine, (1, 2))
        pool.learn(engine, (3, 4))
        assert pool.index.held("a", Tier.GPU) == 3

    def test_an_unknown_capacity_is_assumed(self, fleet):
        engine = add_ready(fleet, "a", gpu_blocks=None)
        assert engine.learned.capacity == ASSUMED_CAPACITY_TOKENS // 16

    def test_a_flush_is_forgotten(self, fleet):
        engine = add_ready(fleet, "a")
        pool = fleet.pools["m"]
        pool.learn(engine, (1, 2))
        pool.index.store("a", Tier.HOST, (2,))
        pool.forget(engine, (2,))
        assert (pool.index.held("a", Tier.GPU), pool.index.held("a", Tier.HOST), len(engine.learned)) == (
            1,
            0,
            1,
        )
        pool.wipe(engine)
        assert (len(pool.index), len(engine.learned)) == (0, 0)

    def test_an_engine_that_left_takes_its_blocks_along(self, fleet):
        engine, other = add_ready(fleet, "a"), add_ready(fleet, "b")
        pool = fleet.pools["m"]
        pool.learn(engine, (1, 2))
        pool.learn(other, (2,))
        fleet.leave(engine)
        fleet.leave(engine)
        assert fleet.pool_of(engine) is None
        assert len(pool.index) == 1
        pool.learn(engine, (9,))
        assert len(pool.index) == 1


def test_events_and_prompts_meet_in_one_namespace(fleet):
    from proxy.core.view import EngineView

    add_ready(fleet, "a")
    pool = fleet.pools["m"]
    view = EngineView("a", pool.index, pool.root_of, 16)
    view.apply(BlocksStored(Tier.GPU, None, (1, 2), PROMPT.token_ids[:32], 16, salt="s"))
    assert pool.index.match(pool.chain(PROMPT).hashes) == {}
    assert pool.index.match(pool.chain(Prompt(PROMPT.token_ids, None, "s")).hashes) == {"a": Match(gpu=2)}
