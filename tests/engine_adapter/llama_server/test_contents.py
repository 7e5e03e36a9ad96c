"""What is saved, restored and found out on real slots, and what the mirror is told of it."""

from __future__ import annotations

import logging
from array import array
from dataclasses import replace

import pytest

from engine_adapter import Tier
from engine_adapter.llama_server import contents as contents_module
from engine_adapter.llama_server import saved_files, slot_io
from engine_adapter.llama_server.checkpoints import PLAIN, MemoryRules
from engine_adapter.llama_server.contents import MANY_CHANGES
from engine_adapter.llama_server.saved_files import read_tokens
from engine_adapter.llama_server.scheduler import SlotRequest
from engine_adapter.llama_server.server_files import UNKNOWN_OWNER
from scripts.make_gguf import gguf_path
from tests.engine_adapter.llama_server.scheduler_world import no_directory, scheduler_world, stopped
from tests.engine_adapter.llama_server.slot_world import blocks_in, prompt_of
from tests.state_files import write_state


@pytest.fixture
def world(scheduler):
    return scheduler


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.WARNING, "kvpin.llama_server")
    return lambda: caplog.messages


async def held(world):
    return (await blocks_in(world.mirror.follow())).get(Tier.GPU, 0)


class TestSave:
    async def test_the_file_holds_what_the_slot_does(self, world):
        lease = await world.ask(prompt_of(1))
        assert await world.save(lease.slot)
        (entry,) = world.entries()
        slot = world.table[lease.slot]
        assert entry.tokens == slot.tokens == await world.truth(slot.id) == read_tokens(world.file(entry))
        assert (slot.saved, slot.dirty) == (103, False)
        counts = world.contents.counts
        assert (counts.saves, counts.saved_tokens) == (1, 103)
        assert world.contents.rates.bytes_per_token == entry.size / 103

    async def test_what_was_not_known_of_it_is_known_then(self, world):
        lease = await world.ask(prompt_of(1), chunks=40, max_tokens=500, ignore_eos=True)
        slot = world.table[lease.slot]
        assert slot.unknown >= 32
        blocks = await held(world)
        assert await world.save(slot.id)
        assert (slot.unknown, slot.tokens) == (0, await world.truth(slot.id))
        assert await held(world) > blocks

    @pytest.mark.parametrize("rules", [{"is_recurrent": True}, {"loses_window": True}])
    async def test_what_cannot_be_cut_stays_beside_its_next_turn(self, world, rules):
        """A question about the same document restores the first file: the second one is of no use to it."""
        world.contents.learn(replace(world.facts, memory=MemoryRules(1024, **rules)))
        lease = await world.ask(prompt_of(1))
        slot = world.table[lease.slot]
        assert await world.save(slot.id)
        longer = slot.tokens + prompt_of(2, 30)
        assert (await world.ask(longer)).slot == slot.id
        assert await world.save(slot.id)
        assert sorted(len(entry.tokens) for entry in world.entries()) == [103, 136]
        await world.save(slot.id)
        assert len(world.entries()) == 2, "the same tokens once more"
        world.table.hold(slot.id, longer[:120], None)
        world.contents.note_files([slot])
        assert slot.saved == 103, "the longer file does not bring back a part of itself"

    async def test_nothing_to_save_is_nothing_saved(self, world):
        assert not await world.save(0)
        world.contents.mark_unknown(world.table[0], 50)
        assert not await world.save(0)
        assert world.contents.counts.failed_saves == 0
        assert list(world.server.save_dir.iterdir()) == []

    async def test_one_that_is_never_answered_loses_no_slot(self, two_slots, monkeypatch, said):
        monkeypatch.setattr(slot_io, "MOVE_S", 0.3)
        async with scheduler_world(two_slots) as world:
            lease = await world.ask(prompt_of(1))
            with stopped(two_slots):
                assert not await world.save(lease.slot)
            assert world.table[lease.slot].tokens == await world.truth(lease.slot)
            assert not world.contents.can_save
            assert "could not be saved" in said()[-1]

    async def test_each_one_that_fails_pauses_saving_for_longer_until_one_works(self, world, said):
        """For 1, 2, 4, … seconds, at most a minute; then anew."""
        contents, slot = world.contents, world.table[(await world.ask(prompt_of(1))).slot]
        for pause_s in (1, 2, 4, 8, 16, 32, 60, 60):
            with no_directory(world.server):
                assert not await world.save(slot.id)
            world.clock.ahead += pause_s - 0.5
            assert (contents.can_save, contents.can_restore) == (False, True)
            world.clock.ahead += 0.5
            assert contents.can_save
        assert (slot.length, slot.dirty, slot.operation) == (103, True, None)
        assert (contents.counts.saves, contents.counts.failed_saves) == (0, 8)
        assert str(world.server.save_dir) in said()[0]
        await world.check()
        assert await world.save(slot.id)
        await world.ask(prompt_of(1, 150))
        with no_directory(world.server):
            await world.save(slot.id)
        world.clock.ahead += contents_module.SAVE_PAUSE_S
        assert contents.can_save

    async def test_a_file_beyond_the_room_there_is_is_removed(self, two_slots, said):
        async with scheduler_world(two_slots, host_bytes=1000) as world:
            lease = await world.ask(prompt_of(1))
            assert not await world.save(lease.slot)
            assert not world.contents.can_save
            assert list(two_slots.save_dir.iterdir()) == []
            assert world.table[lease.slot].dirty
            assert "do not fit" in said()[-1]

    async def test_a_server_that_falls_asleep_while_the_file_is_checked_holds_nothing(
        self, start_llama, save_dir, monkeypatch
    ):
        server = start_llama("--sleep-idle-seconds", "1", slots=2, ctx=1024, save_dir=save_dir)
        async with scheduler_world(server) as world:
            add = world.registry.add

            async def added_late(*saved, **more):
                entry = await add(*saved, **more)
                await world.until_asleep()
                assert await world.scheduler.look()
                return entry

            monkeypatch.setattr(world.registry, "add", added_late)
            lease = await world.ask(prompt_of(1))
            slot = world.table[lease.slot]
            assert await world.save(slot.id)
            assert (slot.is_empty, slot.saved, await held(world)) == (True, 0, 0)
            assert (len(world.entries()), world.contents.counts.strangers) == (1, 0)
            again = await world.ask(prompt_of(1))
            assert (again.restored, again.cached_tokens, again.answer.cached_tokens) == (True, 99, 99)

    async def test_what_somebody_else_put_there_is_for_nobody(self, world):
        """As long as what the tenant had: only the file shows it."""
        lease = await world.ask(prompt_of(1), "a")
        await world.complete(prompt_of(2), lease.slot)
        assert not await world.save(lease.slot)
        slot = world.table[lease.slot]
        assert (slot.salt, slot.unknown) == (UNKNOWN_OWNER, 103)
        assert world.contents.counts.strangers == 1
        assert world.entries() == []
        assert list(world.server.save_dir.iterdir()) == []
        assert await held(world) == 0

    async def test_what_somebody_else_emptied_is_empty(self, world):
        lease = await world.ask(prompt_of(1))
        await slot_io.erase(world.control, lease.slot)
        assert not await world.save(lease.slot)
        assert world.table[lease.slot].is_empty
        assert world.contents.counts.strangers == 1
        assert list(world.server.save_dir.iterdir()) == []


class TestRestore:
    async def test_what_the_server_refuses_is_kept_for_others_and_has_emptied_the_slot(self, world, said):
        """A file that is whole and unharmed, and no KV of this model."""
        lease = await world.ask(prompt_of(2))
        name = saved_files.new_name(world.facts.key)
        write_state(world.server.save_dir / name, [5, 6, 7], b"no KV")
        entry = await world.registry.add(name, world.facts.key, None)
        assert not await world.restore(lease.slot, entry)
        assert world.table[lease.slot].is_empty
        assert await held(world) == 0
        assert (world.entries(), list(world.contents.entries())) == ([entry], [])
        assert world.file(entry).exists()
        assert world.contents.counts.failed_restores == 1
        assert name in said()[-1]
        await world.check()

    async def test_a_file_that_was_harmed_is_not_even_tried(self, world, said):
        entry = await world.saved_away(prompt_of(1))
        lease = await world.ask(prompt_of(2))
        path = world.file(entry)
        data = bytearray(path.read_bytes())
        data[-100] ^= 1
        path.write_bytes(data)
        assert not await world.restore(lease.slot, entry)
        slot = world.table[lease.slot]
        assert slot.tokens[:100] == prompt_of(2)
        assert (slot.length, await world.truth(slot.id)) == (103, slot.tokens)
        assert world.entries() == []
        assert world.contents.counts.failed_restores == 1
        assert entry.name in said()[-1]

    async def test_what_fits_no_slot_is_of_no_use_here(self, world):
        for count in (2048, 2049):
            name = saved_files.new_name(world.facts.key)
            write_state(world.server.save_dir / name, list(prompt_of(count, count)))
            await world.registry.add(name, world.facts.key, None)
        assert [len(entry.tokens) for entry in world.contents.all_entries()] == [2048, 2049]
        assert [len(entry.tokens) for entry in world.contents.entries()] == [2048]


class TestNotes:
    async def test_without_its_file_a_slot_is_not_saved_any_more(self, world):
        first = await world.ask(prompt_of(1, head=64))
        world.table.pin(first.slot, 100, world.clock() + 60)
        second = await world.ask(prompt_of(2, head=64))
        for lease in (first, second):
            assert await world.save(lease.slot)
        await world.contents.forget(world.entries()[0])
        assert [world.table[lease.slot].saved for lease in (first, second)] == [64, 103]
        world.contents.mark_unknown(world.table[second.slot], 103)
        await world.contents.forget(world.entries()[0])
        assert [world.table[lease.slot].saved for lease in (first, second)] == [0, 103]

    async def test_what_came_twice_is_saved_once(self, world):
        entry = await world.saved_away(prompt_of(1))
        world.table.hold(0, entry.tokens, None)
        world.table.hold(1, entry.tokens[:90] + prompt_of(2, 20), None)
        world.contents.note_files(world.table)
        assert [slot.saved for slot in world.table] == [103, 90]
        world.table.hold(0, entry.tokens, "a")
        world.contents.note_files(world.table)
        assert world.table[0].saved == 0

    async def test_a_model_that_restores_in_vain_is_found_out(self, start_llama, save_dir, said):
        """One with sliding windows: what was restored is computed again."""
        server = start_llama(model=gguf_path("swa"), slots=2, ctx=1024, save_dir=save_dir)
        async with scheduler_world(server) as world:
            entries = [await world.saved_away(prompt_of(seed, 300)) for seed in range(3)]
            for seed in range(2):
                assert world.contents.can_restore
                lease = await world.ask(prompt_of(seed, 300))
                assert lease.restored
                assert lease.answer.cached_tokens < 150
            assert not world.contents.can_restore
            assert not world.contents.can_save
            assert not world.contents.reuses_any_prefix
            assert (list(world.contents.entries()), world.entries() != []) == ([], True)
            assert ["restoring does not pay" in finding.problem for finding in world.contents.findings] == [
                True
            ]
            assert not (await world.ask(prompt_of(2, 300))).restored
            assert len(entries[2].tokens) == 303
            assert len([text for text in said() if "restoring does not pay" in text]) == 1

    @pytest.mark.parametrize(
        ("rules", "finding"),
        [
            pytest.param(MemoryRules(1024, is_recurrent=True), "--ctx-checkpoints", id="checkpoints"),
            pytest.param(replace(PLAIN, chunk=16), "does not move KV as kvpin expects", id="moved KV"),
            pytest.param(PLAIN, None, id="nothing to be wrong about"),
        ],
    )
    def test_predictions_that_keep_failing_are_no_longer_firm(self, world, said, rules, finding):
        world.contents.learn(replace(world.facts, memory=rules))
        for is_right in (False, False, True, False, False):
            world.contents.note_prediction(is_right=is_right)
        assert world.contents.rules.is_sure
        for _ in range(3):
            world.contents.note_prediction(is_right=False)
        assert world.contents.rules.is_sure == (finding is None)
        assert any(slot.memory.is_firm(0, 20) for slot in world.table) == (finding is None)
        assert [finding in each.problem for each in world.contents.findings] == [True] * (finding is not None)
        assert len(said()) == len(world.contents.findings)

    def test_user_messages_matter_to_chats_on_a_memory_with_checkpoints(self, world):
        tokens = array("i", [7, 8, 9, 7, 8])
        plain = replace(world.facts, user_mark=(7, 8))
        assert world.scheduler.user_starts(SlotRequest(tokens, is_chat=True)) == ()
        world.contents.learn(replace(plain, memory=MemoryRules(1024, is_recurrent=True)))
        assert world.scheduler.user_starts(SlotRequest(tokens, is_chat=True)) == (0, 3)
        assert world.scheduler.user_starts(SlotRequest(tokens)) == ()

    def test_once_in_vain_is_nothing(self, world):
        for in_vain in (True, False, True, False, True):
            world.contents.note_restored(in_vain=in_vain)
        assert world.contents.can_restore
        assert world.contents.findings == []

    def test_many_surprises_are_a_finding_and_once(self, world, said):
        for times in range(1, 3 * MANY_CHANGES):
            world.contents.mark_changed(world.table[0], 10)
            assert len(world.contents.findings) == (times >= MANY_CHANGES)
        assert "-np N" in world.contents.findings[0].problem
        assert len(said()) == 1
        assert world.contents.counts.strangers == times
