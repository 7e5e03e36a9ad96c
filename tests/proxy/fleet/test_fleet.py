from array import array
from dataclasses import replace
from types import SimpleNamespace

import pytest
import structlog
from msgspec import structs

from engine_adapter import Tier
from proxy.core.admission import Needs
from proxy.errors import NoEngine, NotFound
from proxy.fleet.engine import EngineState
from proxy.fleet.fleet import Fleet
from proxy.fleet.managed_engine import ProcessState
from proxy.prompt import Prompt
from tests.fakes import INFO, FakeAdapter, add_ready

PROMPT = Prompt(array("i", range(40)))
ADA = Needs(lora="ada")


def test_an_engine_that_joins_is_told_the_prices_that_its_pool_learns(fleet, monkeypatch):
    told = []
    monkeypatch.setattr(FakeAdapter, "priced_by", lambda _, *prices: told.append(prices))
    add_ready(fleet, "a")
    placer = fleet.pool("m").placer
    assert told == [(placer.books["a"].rates.prefill_s, placer.demand.returns)]


class TestAdapters:
    """LoRA adapters: clients name them as models."""

    @pytest.fixture
    def engines(self, fleet):
        return (
            add_ready(fleet, "a", loras=frozenset({"ada"})),
            add_ready(fleet, "b"),
            add_ready(fleet, "n", model="n"),
        )

    def test_only_engines_that_serve_it_are_candidates(self, fleet, engines):
        pool = fleet.pool("ada")
        prompt = structs.replace(PROMPT, lora="ada")
        chain = pool.chain(prompt)
        pool.index.store("b", Tier.GPU, chain.hashes)  # a hash is a hash; nobody could have put it there
        for candidates in (pool.candidates(chain, prompt, ADA), pool.candidates(None, needs=ADA)):
            assert [candidate.engine for candidate in candidates] == ["a"]
        assert len(pool.candidates(None)) == 2

    def test_what_no_engine_serves_now_is_told_unless_another_kvpin_may(self, fleet, engines):
        a, b, n = engines
        assert fleet.unserved() == []
        a.state = EngineState.DRAINING
        assert fleet.unserved() == ["ada"]
        b.state = EngineState.DRAINING
        assert fleet.unserved() == ["m", "ada"]
        b.state = EngineState.SUSPECT
        n.state = EngineState.DOWN
        assert fleet.unserved() == ["n", "ada"]
        n.is_served_there = True
        assert fleet.unserved() == []

    def test_its_chain_is_its_own_under_each_salt(self, fleet, engines):
        pool = fleet.pool("m")
        prompts = [
            structs.replace(PROMPT, lora=a, salt=s) for a in (None, "ada", "lin") for s in (None, "ada", "s")
        ]
        assert len({pool.chain(prompt).hashes for prompt in prompts}) == len(prompts)

    def test_it_is_waited_for_while_its_engine_is_lost_and_forgotten_with_it(self, fleet, engines):
        engine = engines[0]
        fleet.leave(engine)
        assert fleet.pool("ada").candidates(None, needs=ADA) == []
        fleet.join(engine, replace(INFO, loras=frozenset({"lin"})))
        assert sorted(fleet.served()) == ["lin", "m", "n"]
        fleet.leave(engine)
        fleet.remove(fleet.engine("a"))
        assert sorted(fleet.served()) == ["m", "n"]

    @pytest.mark.parametrize("adapter_first", [True, False])
    def test_a_model_wins_over_an_adapter_of_its_name_and_that_is_told_once(self, fleet, adapter_first):
        with structlog.testing.capture_logs() as logs:
            if not adapter_first:
                add_ready(fleet, "n", model="x")
            add_ready(fleet, "a", loras=frozenset({"x"}))
            if adapter_first:
                add_ready(fleet, "n", model="x")
            add_ready(fleet, "b", loras=frozenset({"x"}))
        assert [(log["lora"], log["parent"]) for log in logs] == [("x", "m")]
        assert (fleet.pool("x").model, fleet.pool("x").lora_of("x")) == ("x", None)
        assert fleet.served() == {"m": "m", "x": "x"}


class TestNames:
    """What a request's `model` stands for."""

    @staticmethod
    def of(*engines, **options):
        fleet = Fleet(**options)
        for number, info in enumerate(engines):
            model = info.pop("model")
            add_ready(fleet, f"e{number}", model=model, **info)
        return fleet

    @staticmethod
    def found(fleet, name):
        pool, own = fleet.find(name)
        return pool.model, own

    def test_the_only_pool_that_takes_any_name_gets_unknown_ones(self):
        fleet = self.of({"model": "any", "any_model": True}, {"model": "n", "loras": frozenset({"ada"})})
        assert self.found(fleet, "gpt-9") == ("any", "any")
        assert self.found(fleet, "ada") == ("n", "ada")
        assert self.found(fleet, "n") == ("n", "n")
        with pytest.raises(NotFound, match="model must be named"):
            fleet.find(None)

    def test_two_that_take_any_name_are_no_answer_but_the_default_is(self):
        engines = [{"model": name, "any_model": True} for name in "ab"]
        with pytest.raises(NotFound, match="'gpt-9' does not exist; served: a, b"):
            self.of(*map(dict, engines)).find("gpt-9")
        fleet = self.of(*engines, default_model="b")
        assert self.found(fleet, "gpt-9") == self.found(fleet, None) == ("b", "b")

    def test_names_that_nothing_serves(self):
        aliases = {"gpt": "m", "tuned": "ada", "lost": "gone"}
        engine = {"model": "m", "loras": frozenset({"ada"})}
        fleet = self.of(dict(engine), aliases=aliases, default_model="tuned")
        assert fleet.lost_names() == {"gone": "alias 'lost'"}
        assert self.of(engine, default_model="n").lost_names() == {"n": "default model"}

    def test_an_alias_names_a_model_or_an_adapter_and_loses_to_both(self):
        aliases = {"gpt": "m", "tuned": "ada", "n": "m", "ada": "n", "lost": "gone"}
        fleet = self.of({"model": "m", "loras": frozenset({"ada"})}, {"model": "n"}, aliases=aliases)
        assert self.found(fleet, "gpt") == ("m", "m")
        assert self.found(fleet, "tuned") == ("m", "ada")
        assert self.found(fleet, "n") == ("n", "n")
        assert self.found(fleet, "ada") == ("m", "ada")
        assert fleet.served_aliases() == {"gpt": "m", "tuned": "ada"}
        with pytest.raises(NotFound, match="'lost' is an alias of 'gone', which is not served") as caught:
            fleet.find("lost")
        assert (caught.value.param, caught.value.code) == ("model", "model_not_found")

    def test_what_stands_for_something_that_is_not_served_is_served_by_no_other_model(self):
        fleet = self.of({"model": "m"}, {"model": "n"}, default_model="gone")
        for name in ("gpt-9", None):
            with pytest.raises(NotFound, match="the default model 'gone' is not served; served: m, n"):
                fleet.find(name)
        fleet = self.of({"model": "m", "any_model": True}, aliases={"gpt": "gone"}, default_model="m")
        with pytest.raises(NotFound, match="'gpt' is an alias of 'gone'"):
            fleet.find("gpt")

    def test_while_an_engine_connects_no_other_serves_what_may_be_its_model(self):
        fleet = self.of({"model": "m", "any_model": True}, default_model="m")
        coming = fleet.add(FakeAdapter("coming"))
        with pytest.raises(NoEngine, match="'gpt-9' is not served yet, and engine 'coming' is still conn"):
            fleet.find("gpt-9")
        fleet.aliases = {"gpt": "its own"}
        with pytest.raises(NoEngine, match="'gpt' is not served yet"):
            fleet.find("gpt")
        assert self.found(fleet, "m") == ("m", "m")
        assert self.found(fleet, None) == ("m", None)
        coming.state = EngineState.DOWN
        assert self.found(fleet, "gpt-9") == ("m", "m")

    @pytest.mark.parametrize(
        ("options", "engines", "matters"),
        [
            ({}, [{"model": "m"}], False),
            ({}, [{"model": "m", "loras": frozenset({"ada"})}], True),
            ({}, [{"model": "m"}, {"model": "n"}], True),
            ({"aliases": {"gpt": "m"}}, [{"model": "m"}], True),
            ({"default_model": "m"}, [{"model": "m"}], True),
        ],
    )
    def test_where_a_name_decides_nothing_it_need_not_be_read(self, options, engines, matters):
        assert self.of(*map(dict, engines), **options).has_choice is matters


class TestPools:
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
        engine, other = add_ready(fleet, "a"), add_ready(fleet, "b")
        pool = fleet.pools["m"]
        fleet.leave(engine)
        assert fleet.pool("m") is pool
        assert fleet.join(engine, INFO) is pool
        fleet.leave(engine)
        fleet.remove(other)
        assert (list(fleet.engines), fleet.pools) == (["a"], {"m": pool})
        fleet.remove(engine)
        assert fleet.pools == {}

    def test_an_engine_that_was_removed_takes_no_namesake_along(self, fleet):
        old = add_ready(fleet, "a")
        fleet.remove(old)
        new = add_ready(fleet, "a")
        assert fleet.pool_of(old) is None
        fleet.leave(old)
        fleet.remove(old)
        assert fleet.engines == fleet.pool_of(new).engines == {"a": new}

    def test_ready_means_any_is_and_those_of_the_start_were_tried(self, fleet):
        assert not fleet.is_ready()
        one, two = add_ready(fleet, "a"), add_ready(fleet, "b")
        for state, is_ready in (
            (EngineState.CONNECTING, False),
            (EngineState.READY, True),
            (EngineState.DOWN, True),
            (EngineState.CONNECTING, True),  # it joined later, or comes back
        ):
            two.state = state
            assert fleet.is_ready() is is_ready
        one.state = two.state = EngineState.DRAINING
        assert not fleet.is_ready()


SHORTLY = "try again shortly"


def told(fleet, said):
    """What a client is told whose request no engine can take: it holds this."""
    with pytest.raises(NoEngine, match=said) as caught:
        fleet.find("m")
    return str(caught.value)


def test_where_every_engine_refuses_kvpin_the_operator_has_to_act(fleet):
    one, two = fleet.add(FakeAdapter("a")), fleet.add(FakeAdapter("b"))
    one.state, one.refuses, one.last_error = EngineState.DOWN, True, "it wants a key"
    two.state = EngineState.DOWN  # it cannot be reached
    assert told(fleet, SHORTLY)
    two.refuses = True
    said = told(fleet, "the operator has to act, and `kvpin engines` says how")
    assert "key" not in said
    assert str(fleet.none_ready(None, None)) == said, "also where they served before"
    two.state = EngineState.CONNECTING
    assert told(fleet, SHORTLY)
    assert SHORTLY in str(fleet.none_ready(None, None))


def test_where_an_operator_removed_every_engine_clients_are_told(fleet):
    assert told(fleet, SHORTLY)
    fleet.book.remove("http://gpu", now=1.0)
    assert told(fleet, "lists those that an operator has removed")
    fleet.add(FakeAdapter("a"))
    assert told(fleet, SHORTLY)


def test_where_every_engine_was_given_up_nobody_is_told_to_try_again(fleet):
    given_up = SimpleNamespace(starting=False, error="exit code 2", state=ProcessState.FAILED)
    fleet.add(FakeAdapter("a")).process = given_up
    assert told(fleet, "given up starting them, and `kvpin engines` says why")
    fleet.add(FakeAdapter("b"))
    assert told(fleet, SHORTLY)
