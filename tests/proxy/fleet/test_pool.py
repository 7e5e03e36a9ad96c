import json
from array import array
from dataclasses import replace
from math import inf
from time import monotonic

import pytest
from msgspec import structs

from engine_adapter import Capability, Forecast, JsonBody, Tier
from proxy.core.admission import Needs
from proxy.core.index.match import Match
from proxy.core.placement.decision import Cost
from proxy.core.placement.load import Work
from proxy.fleet.engine import Engine, EngineState
from proxy.prompt import Prompt
from proxy.settings import LimitSettings
from tests.fakes import INFO, FakeAdapter, add_ready
from tests.placements import placement_of

PROMPT = Prompt(array("i", range(40)))


class TestTokenisers:
    def test_those_that_tokenise_are_asked_while_they_are_ready(self, fleet):
        add_ready(fleet, "a")
        able, ill = (add_ready(fleet, name, capabilities=frozenset({Capability.TOKENIZE})) for name in "bc")
        ill.state = EngineState.SUSPECT
        assert fleet.pools["m"].tokenisers(None) == [able.adapter]
        able.info = replace(able.info, capabilities=frozenset({Capability.RENDER}))
        assert (fleet.pools["m"].tokenisers(None), fleet.pools["m"].renderers(None)) == ([], [able.adapter])
        assert fleet.pools["m"].embedders(None) == []
        assert not fleet.pools["m"].takes_embeds
        able.info = replace(able.info, renders_embeds=True)
        assert fleet.pools["m"].embedders(None) == [able.adapter]
        assert fleet.pools["m"].takes_embeds
        able.info = replace(able.info, renders_embeds=False, renders_alike=True)
        assert fleet.pools["m"].takes_embeds


class TestCandidates:
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
        pool, part = fleet.pools["m"], structs.replace(PROMPT, whole=False)
        chain = pool.chain(part)
        for name in "ab":
            pool.index.store(name, Tier.GPU, chain.hashes)
        a, b = pool.candidates(chain, part)
        # Who leases its slots reuses nothing for it; others do, and maybe more than that.
        assert (a.forecast, a.match, a.complete) == (None, Match(), False)
        assert (b.forecast, b.match, b.complete) == (None, Match(gpu=len(chain.hashes)), False)

    def test_one_that_is_lost_or_finishes_what_it_has_is_none(self, fleet):
        engines = [add_ready(fleet, name) for name in "abcdefg"]
        pool = fleet.pools["m"]
        chain = pool.chain(PROMPT)
        for engine, state in zip(engines, EngineState, strict=True):
            pool.index.store(engine.id, Tier.GPU, chain.hashes)  # it would be the best of all
            engine.state = state
        assert {engine.state for engine in engines} == set(EngineState)
        for prompt in (None, PROMPT):
            (only,) = pool.candidates(pool.chain(prompt), prompt)
            assert fleet.engines[only.engine].state is EngineState.READY

    def test_one_that_cannot_do_what_a_request_needs_is_none(self, fleet):
        add_ready(fleet, "a", loras=frozenset({"ada"}), routes=frozenset({"/tokenize"}))
        suspect = add_ready(fleet, "b")
        lacking = add_ready(fleet, "c")
        suspect.state = EngineState.SUSPECT
        lacking.lacks.add("/v1/embeddings")
        engines_for = fleet.pools["m"].engines_for
        assert engines_for(Needs()) == {"a", "c"}
        assert engines_for(Needs(lora="ada")) == {"a"}
        assert engines_for(Needs(native="/tokenize")) == {"a"}
        assert engines_for(Needs(route="/v1/embeddings")) == {"a"}
        assert engines_for(Needs(route="/v1/embeddings", home="c")) == {"c"}, "it may have the route by now"
        assert engines_for(Needs(home="b")) == {"b"}, "no other can take it"
        assert engines_for(Needs(home="gone")) == set()
        assert engines_for(Needs(kind="openai_compatible")) == {"a", "c"}
        assert engines_for(Needs(kind="vllm")) == set()

    def test_tenants_share_kv_if_they_may_on_all_engines_and_what_has_no_salt_goes_to_no_other(self, fleet):
        sharing = fleet.add(FakeAdapter("a", share_kv=True))
        pool = fleet.join(sharing, INFO)
        sharing.state = EngineState.READY
        assert pool.shares_kv
        add_ready(fleet, "b")  # after requests were prepared
        assert not pool.shares_kv
        assert pool.engines_for(Needs(shares=True)) == {"a"}
        assert pool.engines_for(Needs()) == {"a", "b"}
        fleet.leave(sharing)
        assert not pool.shares_kv
        assert pool.engines_for(Needs(shares=True)) == set()

    def test_a_pool_whose_engine_is_lost_or_starts_has_one_coming_back(self, fleet):
        engine, pool = add_ready(fleet, "a"), fleet.pools["m"]
        expected = {EngineState.CONNECTING, EngineState.DOWN}
        for state in EngineState:
            engine.state = state
            assert pool.is_coming_back is (state in expected)
        fleet.leave(engine)
        assert pool.is_coming_back


def test_a_flush_is_forgotten(fleet):
    engine = add_ready(fleet, "a")
    pool = fleet.pools["m"]
    pool.learn(engine, (1, 2, 3))
    pool.index.store("a", Tier.HOST, (2,))
    pool.forget(engine, (1, 2))
    held = pool.index.held("a", Tier.GPU), pool.index.held("a", Tier.HOST), len(engine.learned)
    assert held == (1, 0, 1)
    pool.wipe(engine)
    assert (len(pool.index), len(engine.learned)) == (0, 0)


async def test_a_request_that_ends_on_a_replaced_engine_teaches_nothing_of_its_successor(fleet):
    old, pool = add_ready(fleet, "a"), fleet.pools["m"]
    chain = pool.chain(PROMPT)
    placed = pool.placer.begin(monotonic(), "a", Work(40), chain)
    new = fleet.replace(old, FakeAdapter("a"))
    assert fleet.join(new, INFO) is pool
    pool.end(old, placed, 40, None)
    assert not pool.index.match(chain.hashes)
    assert pool.learn(new, chain.hashes)


@pytest.mark.parametrize("is_lost", [True, False])
async def test_a_request_of_another_kvpin_that_outlives_a_loss_teaches_nothing_of_the_next_process(
    fleet, is_lost
):
    """The other kvpin has not noticed the loss. Without one, an engine that joins anew holds the prompt."""
    engine, pool = add_ready(fleet, "a"), fleet.pools["m"]
    chain = pool.chain(PROMPT)
    placed = pool.placer.begin(monotonic(), "a", Work(40), chain)
    if is_lost:
        fleet.leave(engine)
    fleet.join(engine, INFO)
    pool.end(engine, placed, 40, None)
    assert bool(pool.index.match(chain.hashes)) is not is_lost


class TestBusy:
    @pytest.fixture
    def kept(self, fleet, monkeypatch):
        """The unanswered requests of two engines."""
        kept = {add_ready(fleet, name).id: [1, 2] for name in "ab"}
        monkeypatch.setattr(Engine, "unanswered", property(lambda engine: kept[engine.id]))
        fleet.pools["m"].placer.rates.computed(1000, 1.0, 0)
        return kept

    def test_nothing_waits_while_one_engine_is_not_busy(self, fleet, kept):
        """A request may still go to the busy one, where its prefix lies: its cost holds the wait."""
        pool = fleet.pools["m"]
        busy, other = Cost("a", queue_s=9.0), Cost("b", queue_s=9.0)
        assert pool.is_busy(placement_of("a", 0, 40, (busy, other), "lowest cost"), ())
        assert not pool.is_busy(placement_of("a", 0, 40, (busy, Cost("b")), "lowest cost"), ())
        kept["b"].clear()
        assert not pool.is_busy(placement_of("a", 0, 40, (busy, other), "lowest cost"), ())

    def test_an_engine_is_free_if_it_would_begin_a_short_prompt_soon(self, fleet, kept):
        pool, engine = fleet.pools["m"], fleet.engines["a"]
        assert pool.is_free("a")
        engine.ledger.begin(monotonic(), 9.0, None)
        assert not pool.is_free("a")
        assert pool.is_free("b")
        kept["a"].pop()
        assert pool.is_free("a")


class TestSlots:
    """Two engines with slots: of `a`, the slot of a conversation is busy."""

    AWAITED = Forecast(90, wait_s=2.0, idle_s=9.0)

    @pytest.fixture
    def ask(self, fleet, monkeypatch):
        """Forecasts of each engine → (is its turn still to come after some seconds, where it goes then)."""
        for name in "ab":
            engine = add_ready(fleet, name)
            monkeypatch.setattr(engine.adapter, "one_owner", True, raising=False)
        pool = fleet.pools["m"]

        def ask(a, b, *, chosen="a", prompt=PROMPT, **waits):
            for name, told in (("a", a), ("b", b)):
                monkeypatch.setattr(fleet.engines[name].adapter, "forecast", lambda _prompt, told=told: told)
            candidates = pool.candidates(pool.chain(prompt), prompt)
            placement = placement_of(chosen, 0, 40, (Cost(chosen),), "lowest cost")
            is_busy = pool.is_busy(placement, candidates, **waits)
            return is_busy, [each.engine for each in pool.at_once(placement, candidates)]

        return ask

    def test_a_request_waits_for_its_slot_as_long_as_the_best_idle_one_would_cost(self, ask):
        idle = Forecast(0, prefill_s=5.0)
        assert ask(self.AWAITED, idle, waited_s=4.9) == (True, ["b"])
        assert ask(self.AWAITED, idle, waited_s=5.1) == (False, ["b"])
        elsewhere = Forecast(0, wait_s=1.0, prefill_s=5.0, idle_s=inf)
        assert ask(self.AWAITED, elsewhere, waited_s=8.9) == (True, ["a"])
        assert ask(self.AWAITED, elsewhere, waited_s=9.1) == (False, ["a"])

    def test_it_goes_at_once_where_its_slot_is_idle_or_a_model_must_be_loaded(self, ask):
        assert ask(Forecast(90), self.AWAITED) == (False, ["a", "b"])
        assert ask(Forecast(0, wait_s=30.0), self.AWAITED) == (False, ["a", "b"])

    def test_while_no_slot_is_idle_it_waits_however_long(self, ask):
        none = Forecast(90, wait_s=0.1, idle_s=inf)
        assert ask(none, none, waited_s=1e6) == (True, ["a", "b"])
        assert ask(none, none, prompt=None) == (False, ["a", "b"]), "it may need no slot"

    def test_nobody_is_refused_for_his_patience(self, fleet, ask):
        idle = Forecast(0, prefill_s=5.0)
        assert ask(self.AWAITED, idle, waited_s=0.9, deadline_s=2.0) == (True, ["b"])
        assert ask(self.AWAITED, idle, waited_s=1.1, deadline_s=2.0) == (False, ["b"])
        fleet.pools["m"].line.bound(LimitSettings(queue_requests=0))
        assert ask(self.AWAITED, idle) == (False, ["b"])


class TestContexts:
    """Engines of one model with different contexts."""

    @pytest.fixture
    def pool(self, fleet):
        add_ready(fleet, "small", max_model_len=2048)
        add_ready(fleet, "large", max_model_len=8192)
        return fleet.pools["m"]

    @pytest.mark.parametrize(
        ("prompt", "asked", "engines"),
        [
            (1000, {}, {"small", "large"}),
            (1900, {"max_tokens": 500}, {"large"}),
            (2048, {}, {"large"}),
            (8000, {"max_completion_tokens": 500}, {"large"}),  # cut, or refused by the engine
            (9000, {}, set()),
        ],
    )
    def test_a_prompt_goes_where_it_fits_with_its_answer(self, pool, prompt, asked, engines):
        body = JsonBody(json.dumps(asked).encode())
        assert pool.engines_for(Needs(context=pool.context_for(prompt, body))) == engines

    def test_the_largest_one_is_the_limit_and_one_that_tells_none_has_no_limit(self, fleet, pool):
        assert pool.context == 8192
        add_ready(fleet, "untold")
        assert pool.context is None


def test_an_adapter_that_was_loaded_anew_from_another_path_has_kv_of_its_own(fleet):
    engine = add_ready(fleet, "a", loras=frozenset({"ada"}), lora_paths={"ada": "/1"})
    pool = fleet.pools["m"]
    before = pool.root_of(None, "ada")
    pool.note_loras("a", replace(engine.info, lora_paths={}))
    pool.note_loras("a", replace(engine.info, lora_paths={"ada": "/1"}))
    assert pool.root_of(None, "ada") == before
    pool.note_loras("a", replace(engine.info, lora_paths={"ada": "/2"}))
    assert pool.root_of(None, "ada") != before
