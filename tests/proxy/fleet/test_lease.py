import asyncio
from array import array
from contextlib import suppress
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from engine_adapter import EngineError, Hold, Role, Tier
from proxy.core.index.match import Match
from proxy.core.placement.load import Remaining
from proxy.core.placement.rates import DEFAULT_PREFILL_TOK_S
from proxy.core.placement.scores import place
from proxy.fleet.lease import LENIENCE, leader, patience_s
from proxy.fleet.pool import PENDING_LINGER_S
from proxy.prompt import Prompt
from tests.fakes import add_ready

PROMPT = Prompt(array("i", range(40)))


class TestLease:
    def lease(self, fleet):
        pool = fleet.pools["m"]
        chain = pool.chain(PROMPT)
        return pool, chain, pool.lease(place(pool.candidates(chain), chain), chain, streams=True)

    async def test_holds_load_and_blocks_and_leaves_what_was_learned(self, fleet):
        engine = add_ready(fleet, "a")
        pool, chain, leasing = self.lease(fleet)
        with leasing as lease:
            assert engine.ledger.in_flight == 1
            assert engine.ledger.view(lease.started).queue_s == pytest.approx(40 / DEFAULT_PREFILL_TOK_S)
            assert pool.index.match(chain.hashes) == {"a": Match(pending=2)}
            assert (engine.served, engine.failed) == (0, 0)  # not yet
            lease.succeeded = True
        assert engine.ledger.in_flight == 0
        assert (engine.served, engine.failed) == (1, 0)
        assert pool.index.match(chain.hashes) == {"a": Match(gpu=2)}
        pool.index.remove("a", Tier.GPU, chain.hashes)
        assert not pool.index.match(chain.hashes)

    async def test_a_prompt_for_another_engine_is_counted_apart_from_what_was_served(self, fleet):
        engine = add_ready(fleet, "a")
        pool, chain = fleet.pools["m"], fleet.pools["m"].chain(PROMPT)
        for error in (None, EngineError("gone")):
            with (
                suppress(EngineError),
                pool.lease(place(pool.candidates(chain), chain), chain, streams=True, part=Role.PREFILL),
            ):
                if error is not None:
                    raise error
        assert (engine.served, engine.prefilled, engine.failed) == (0, 1, 1)

    async def test_an_answer_of_a_process_that_is_lost_teaches_nothing_of_the_next(self, fleet):
        """The client reads slowly: its answer ends after the engine has connected anew."""
        engine = add_ready(fleet, "a")
        pool, chain, leasing = self.lease(fleet)
        with leasing as lease:
            fleet.leave(engine)
            engine.abandon()
            fleet.join(engine, engine.info)
            lease.succeeded = True
        assert (engine.served, pool.index.match(chain.hashes)) == (1, {})
        *_, again = self.lease(fleet)
        with again as lease:
            lease.succeeded = True
        assert pool.index.match(chain.hashes) == {"a": Match(gpu=2)}

    async def test_blocks_stay_pending_while_events_may_still_tell_of_them(self, virtual_time, fleet):
        add_ready(fleet, "a").audit.synced()
        pool, chain, leasing = self.lease(fleet)
        with leasing as lease:
            lease.succeeded = True
        assert pool.index.match(chain.hashes) == {"a": Match(pending=2)}
        await asyncio.sleep(PENDING_LINGER_S * 1.1)
        assert not pool.index.match(chain.hashes)

    async def test_blocks_that_events_told_of_are_not_pending_when_they_leave(self, virtual_time, fleet):
        """A small GPU evicts a prompt before a quarter of a second is over."""
        add_ready(fleet, "a").audit.synced()
        pool, chain, leasing = self.lease(fleet)
        with leasing as lease:
            lease.succeeded = True
        pool.index.store("a", Tier.GPU, chain.hashes)
        pool.placer.told("a")
        pool.index.remove("a", Tier.GPU, chain.hashes)
        assert not pool.index.match(chain.hashes)
        *_, again = self.lease(fleet)
        with again:
            await asyncio.sleep(PENDING_LINGER_S * 1.1)  # it ends none but its own
            assert pool.index.match(chain.hashes) == {"a": Match(pending=2)}

    async def test_a_decode_leg_computes_no_prompt_that_others_wait_for(self, fleet):
        engine = add_ready(fleet, "a")
        pool, chain = fleet.pools["m"], fleet.pools["m"].chain(PROMPT)
        placement = place(pool.candidates(chain), chain)
        with pool.lease(placement, chain, streams=True, part=Role.DECODE) as decoding:
            assert engine.underway == []
            with pool.lease(placement, chain, streams=True) as lease:
                assert engine.underway == [lease]
            await decoding.computes(streams=True)
            assert engine.underway == [decoding]

    async def test_a_decode_leg_waits_for_no_prompt_until_it_computes_one(self, virtual_time, fleet):
        add_ready(fleet, "a")
        pool, chain, leasing = self.lease(fleet)
        with leasing as first:
            again = place(pool.candidates(chain), chain)
            assert again.chosen.pending_tokens == 32
            with pool.lease(again, chain, streams=True, part=Role.DECODE) as decoding:
                began = virtual_time.now
                await decoding.gather()
                assert virtual_time.now == began
                computing = asyncio.ensure_future(decoding.computes(streams=True))
                await asyncio.sleep(0)
                assert not computing.done()
                first.first_byte(streamed=True)
                await computing

    async def test_a_hold_that_knows_better_refines_its_placement(self, fleet):
        add_ready(fleet, "a")
        _, _, leasing = self.lease(fleet)
        with leasing as lease:
            placed = lease.placement
            assert lease.refine(Hold(None)) is placed
            assert lease.refine(Hold(None, firm=False)) == replace(placed, firm=False) != placed
            refined = lease.refine(Hold(None, cached_tokens=5, firm=False))
            assert (refined.predicted_tokens, refined.firm) == (5, False)
            assert replace(refined, predicted_tokens=placed.predicted_tokens, firm=True) == placed
            assert lease.placement is refined


@dataclass
class Underway:
    hashes: tuple
    found: int = 0


class TestLeader:
    @given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=8))
    def test_nobody_ever_waits_for_one_that_waits_for_it(self, rows):
        chain = tuple(range(6))
        prompts = [Underway(chain[:length], min(found, length)) for length, found in rows]
        for prompt in prompts:
            waits_for, seen = leader(prompts, prompt.hashes, prompt.found), 0
            while waits_for is not None:
                seen += 1
                assert seen <= len(prompts)
                waits_for = leader(prompts, waits_for.hashes, waits_for.found)


class TestPatience:
    @pytest.mark.parametrize(
        ("before_s", "own_s", "seen", "patience"),
        [
            (0.0, 1.9, True, 1.9 * LENIENCE),  # side by side, each would take twice as long
            (0.0, 2.0, True, None),
            (50.0, 1.0, True, 51 * LENIENCE),
            (0.5, 1.0, False, 1.5),
        ],
        ids=["it pays", "beside it is as fast", "what is before both delays both", "first token not seen"],
    )
    def test_as_long_as_going_beside_it_would_take_longer(self, before_s, own_s, seen, patience):
        found = patience_s(Remaining(before_s, own_s, seen=seen), 1.0)
        assert found == (patience if patience is None else pytest.approx(patience))
