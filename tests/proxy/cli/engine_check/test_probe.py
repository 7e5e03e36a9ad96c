"""One engine on kvpin's own paths: its first view, and two equal requests."""

from array import array
from dataclasses import replace

import pytest

from engine_adapter import (
    BlocksRemoved,
    BlocksStored,
    Capability,
    EngineUnavailable,
    Tier,
    ViewCurrent,
    ViewLost,
)
from proxy.cli import engine_probe
from proxy.cli.engine_probe import ProbedEngine
from proxy.prompt import PromptBuilder, RegisteredTables
from tests.fakes import INFO, FakeAdapter

EVENTS = frozenset({Capability.KV_EVENTS})
STORED = BlocksStored(Tier.GPU, None, (1, 2), array("i", range(32)), 16)


def ward_of(adapter, **info):
    info = replace(INFO, **info)
    return ProbedEngine(adapter, info, PromptBuilder(info, tables=RegisteredTables()))


class TestFirstView:
    @pytest.mark.parametrize(
        ("current", "said"),
        [
            (ViewCurrent(), "the view is current, with 2 blocks"),
            (ViewCurrent(complete=False), "the view is current, with 2 blocks; it may hold more from before"),
        ],
    )
    async def test_comes_with_what_the_engine_holds(self, current, said):
        adapter = FakeAdapter()
        gone = BlocksStored(Tier.GPU, None, (3,), array("i", range(100, 116)), 16)
        for event in (ViewLost("connected"), STORED, gone, BlocksRemoved(Tier.GPU, (3,)), current):
            adapter.feed.put_nowait(event)
        async with ward_of(adapter, capabilities=EVENTS) as ward:
            view = await ward.first_view(takes_events=False)
        assert (view.state, view.blocks, view.complete, view.detail) == ("current", 2, current.complete, said)

    @pytest.mark.parametrize("event", [ViewLost("no snapshot"), EngineUnavailable("refused")])
    async def test_does_not_come_and_why(self, monkeypatch, event):
        monkeypatch.setattr(engine_probe, "VIEW_S", 0.1)
        adapter = FakeAdapter()
        adapter.feed.put_nowait(event)
        async with ward_of(adapter, capabilities=EVENTS) as ward:
            view = await ward.first_view(takes_events=False)
        assert view.state == "late"
        assert str(event.reason if isinstance(event, ViewLost) else event) in view.detail

    @pytest.mark.parametrize(
        ("info", "state"), [({}, "none"), ({"capabilities": EVENTS, "tokens_per_block": 24}, "unfit")]
    )
    async def test_is_not_waited_for_where_none_can_come(self, info, state):
        adapter = FakeAdapter()
        async with ward_of(adapter, **info) as ward:
            assert (await ward.first_view(takes_events=True)).state == state
        assert adapter.subscriptions == 0


class TestProbe:
    @pytest.mark.parametrize(
        ("info", "n_tokens"),
        [
            ({}, 49),
            ({"tokens_per_block": 64}, 193),
            ({"tokens_per_block": 1}, 49),
            ({"max_model_len": 20}, 19),
        ],
    )
    async def test_is_a_few_blocks_of_the_engines_and_one_token_twice(self, engine, info, n_tokens):
        async with ward_of(FakeAdapter(engine.id, engine.url), **info) as ward:
            found = await ward.probe()
        first, second = (exchange.json["prompt"] for exchange in engine.seen)
        assert (len(first), found.n_tokens) == (n_tokens, n_tokens)
        assert first == second
        assert found.reported == 32
