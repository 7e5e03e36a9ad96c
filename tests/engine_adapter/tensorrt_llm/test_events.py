"""JSON of trtllm-serve in, events of kvpin out: what each means, and what is lost when one is missing."""

import json
from array import array

import pytest

from engine_adapter.errors import EngineUnavailable
from engine_adapter.prompt.extra_ids import media_extra_id
from engine_adapter.tensorrt_llm.events import PolledEventReader
from engine_adapter.types import Attention, BlocksRemoved, BlocksStored, KvGroup, Tier, ViewCurrent, ViewLost

SIZE = 4
WHOLE, IN_PART = ViewCurrent(complete=True), ViewCurrent(complete=False)


def block(name, tokens, **fields):
    return {
        "type": "stored_block",
        "block_hash": name,
        "tokens": [{"type": "unique_token", "token_id": t, "token_extra_id": 0} for t in tokens],
        "cache_level": 0,
        "priority": 35,
        "cache_salt": None,
        "mm_keys": [],
    } | fields


def stored(*blocks, parent=None):
    return {"type": "stored", "parent_hash": parent, "blocks": list(blocks)}


def removed(*names):
    return {"type": "removed", "block_hashes": list(names)}


def updated(name, old, new):
    diff = None if old == new else {"type": "event_diff", "new_value": new, "old_value": old}
    return {"type": "updated", "block_hash": name, "cache_level": diff, "priority": None}


def created(gpu=10, host=5):
    return {"type": "created", "num_blocks_per_cache_level": [gpu, host]}


def answer(*data, first=0, **fields) -> bytes:
    """An answer with events of these data, numbered from `first` on."""
    events = [{"event_id": first + at, "data": d, "window_size": 64} | fields for at, d in enumerate(data)]
    return json.dumps(events).encode()


def run(names, tokens, *, parent=None, tier=Tier.GPU):
    return BlocksStored(tier, parent, tuple(names), array("i", tokens), SIZE)


def named(name, tier):
    return BlocksStored(tier, None, (name,), array("i"), SIZE)


ONE, TWO = block(1, range(4)), block(2, range(4, 8))


@pytest.fixture
def reader():
    """A reader that has seen a process begin."""
    reader = PolledEventReader(SIZE, exact=True)
    assert reader.read(answer(created())) == [WHOLE]
    return reader


class TestBlocks:
    def test_a_partial_block_is_not_followed(self, reader):
        """The last of a prompt; it leaves when the prompt goes on, and then comes again as a full one."""
        events = reader.read(answer(stored(ONE, block(9, [4, 5])), removed(9), first=1))
        assert events == [run((1,), range(4))]
        assert reader.read(answer(stored(block(9, [4])), first=3)) == []
        assert reader.read(answer(stored(TWO, parent=1), first=4)) == [run((2,), range(4, 8), parent=1)]
        assert (reader.skipped, reader.blocks()) == (0, {Tier.GPU: 2})

    def test_removals_are_of_the_tier_a_block_lies_on(self, reader):
        reader.read(answer(stored(ONE, TWO, block(3, range(4))), updated(2, 0, 1), first=1))
        assert reader.read(answer(removed(1, 3, 2, 2, 77), first=3)) == [
            BlocksRemoved(Tier.GPU, (1, 3)),
            BlocksRemoved(Tier.HOST, (2,)),
        ]
        assert not reader.blocks()

    def test_an_offloaded_block_is_stored_below_before_it_leaves(self, reader):
        reader.read(answer(stored(ONE), first=1))
        places = [Tier.GPU, Tier.HOST, Tier.DISK]
        for first, (old, new) in enumerate([(0, 1), (1, 2), (2, 0)], start=2):
            moved = [named(1, places[new]), BlocksRemoved(places[old], (1,))]
            assert reader.read(answer(updated(1, old, new), first=first)) == moved

    def test_a_block_that_goes_where_nobody_knows_is_gone(self, reader):
        reader.read(answer(stored(ONE), first=1))
        assert reader.read(answer(updated(1, 0, 7), first=2)) == [BlocksRemoved(Tier.GPU, (1,))]
        assert not reader.blocks()
        assert reader.read(answer(updated(1, 0, 1), updated(77, 0, 1), first=3)) == [], "nor does it move"

    def test_names_may_be_strings(self, reader):
        events = reader.read(answer(stored(block("a", range(4))), updated("a", 0, 1), removed("a"), first=1))
        assert events == [
            run((b"a",), range(4)),
            named(b"a", Tier.HOST),
            BlocksRemoved(Tier.GPU, (b"a",)),
            BlocksRemoved(Tier.HOST, (b"a",)),
        ]

    def test_what_is_not_told_is_noted(self, reader):
        assert (reader.lacks_salt, reader.lacks_lora) == (False, False)
        reader.read(answer(stored(ONE), first=1))
        assert (reader.lacks_salt, reader.lacks_lora) == (False, True)
        older = {key: value for key, value in TWO.items() if key != "cache_salt"}
        reader.read(answer(stored(older | {"lora_id": 3}), first=2))
        assert reader.lacks_salt

    def test_every_field_of_a_block_is_read(self, reader):
        """As trtllm-serve 1.4 writes it. A newer field is passed over, and a frame may have more, too."""
        told = {
            "type": "stored_block",
            "block_hash": 2**64 - 1,
            "tokens": [{"type": "unique_token", "token_id": 7, "token_extra_id": 2**63}] * 4,
            "cache_level": 1,
            "priority": 35,
            "cache_salt": "s",
            "lora_id": 3,
            "mm_keys": [{"type": "mm_key", "hash": "ab", "start_offset": 0}],
            "newer": 1,
        }
        (event,) = reader.read(answer(stored(told), first=1, hash_algo="sha256"))
        marker = (media_extra_id("ab") + 2**63) % 2**64
        assert (event.tier, event.hashes, event.salt) == (Tier.HOST, (2**64 - 1,), "s")
        assert (event.lora, event.extra_ids.tolist()) == ("lora_id 3", [marker, *[2**63] * 3])

    def test_runs_end_where_the_tier_changes(self, reader):
        blocks = [block(name, range(4), cache_level=level) for name, level in enumerate((0, 1, 1, 0), 1)]
        runs = reader.read(answer(stored(*blocks), first=1))
        assert [(each.tier, each.parent, each.hashes) for each in runs] == [
            (Tier.GPU, None, (1,)),
            (Tier.HOST, 1, (2, 3)),
            (Tier.GPU, 3, (4,)),
        ]

    def test_salt_and_adapter_stand_at_the_root_of_a_chain(self, reader):
        (root,) = reader.read(answer(stored(block(1, range(4), cache_salt="s", lora_id=7)), first=1))
        assert (root.salt, root.lora) == ("s", "lora_id 7")
        child = stored(block(2, range(4), cache_salt="s", lora_id=7), parent=1)
        assert reader.read(answer(child, first=2)) == [run((2,), range(4), parent=1)]

    def test_an_image_is_marked_once_on_the_block_it_begins_in(self, reader):
        keys = [[{"hash": "ab", "start_offset": at}] for at in (0, 1)]
        blocks = [block(1, range(4)), *(block(n, range(4), mm_keys=key) for n, key in enumerate(keys, 2))]
        (event,) = reader.read(answer(stored(*blocks), first=1))
        assert event.extra_ids.tolist() == [*[0] * 4, media_extra_id("ab"), *[0] * 7]
        (rest,) = reader.read(answer(stored(block(4, range(4), mm_keys=keys[1]), parent=2), first=2))
        assert rest.extra_ids is None


class TestProcesses:
    def test_whoever_comes_later_does_not_know_all(self):
        reader = PolledEventReader(SIZE, exact=True)
        assert reader.read(b"[]") == [IN_PART]
        assert not reader.heard
        assert reader.read(answer(stored(ONE), first=7)) == [run((1,), range(4))]
        assert reader.heard

    def test_what_partial_reuse_adds_is_never_known(self):
        assert PolledEventReader(SIZE, exact=False).read(answer(created())) == [IN_PART]

    def test_a_gap_voids_all_before_it(self, reader):
        reader.read(answer(stored(ONE), first=1))
        assert reader.read(answer(removed(1), stored(TWO), first=5)) == [
            ViewLost("events 2 to 4 were lost"),
            run((2,), range(4, 8)),
            IN_PART,
        ]
        assert (reader.gaps, reader.restarts, reader.blocks()) == (1, 0, {Tier.GPU: 1})

    @pytest.mark.parametrize("first", [0, 1, 2])
    def test_a_number_that_falls_is_another_process(self, reader, first):
        reader.read(answer(stored(ONE), stored(TWO), first=1))
        lost, *events = reader.read(answer(created(7, 0), stored(ONE), first=first))
        assert lost == ViewLost(f"the engine was restarted: after event 2 came {first}")
        assert events == [run((1,), range(4)), ViewCurrent(complete=first == 0)]
        assert (reader.gaps, reader.restarts, reader.blocks_per_level) == (0, 1, (7, 0))

    def test_a_number_that_falls_is_another_process_even_if_it_tells_nothing_of_itself(self, reader):
        reader.read(answer(stored(ONE), stored(TWO), first=1))
        told = [ViewLost("the engine was restarted: after event 2 came 2"), run((1,), range(4)), IN_PART]
        assert reader.read(answer(stored(ONE), first=2)) == told

    def test_a_cache_made_again_is_another_process(self, reader):
        reader.read(answer(stored(ONE), first=1))
        assert isinstance(reader.read(answer(created(), first=2))[0], ViewLost)

    def test_what_was_given_up_begins_again_with_the_next_answer(self, reader):
        reader.read(answer(stored(ONE), first=1))
        reader.forget()
        assert reader.read(answer(removed(1), first=2)) == [IN_PART]

    def test_events_before_a_reset_are_taken_note_of(self, reader):
        reader.read(answer(stored(ONE), first=1))
        reader.pass_over(answer(stored(TWO), removed(1), first=2))
        reader.pass_over(b'[{"event_id": null}]')
        reader.pass_over(answer(stored(ONE), first=900, attention_dp_rank=1))
        assert not reader.blocks()
        assert reader.read(answer(stored(TWO), first=4)) == [run((2,), range(4, 8))]
        assert reader.gaps == 0
        assert reader.current() == reader.current(complete=True) == WHOLE
        assert reader.current(complete=False) == IN_PART
        with pytest.raises(EngineUnavailable):
            reader.pass_over(b"{}")


class TestSizes:
    def test_blocks_tell_their_size(self):
        """Two full blocks of 8, where 4 were taken."""
        reader = PolledEventReader(SIZE, exact=True)
        events = reader.read(answer(created(), stored(block(1, range(8)), block(2, range(8))), first=0))
        assert events == [BlocksStored(Tier.GPU, None, (1, 2), array("i", [*range(8)] * 2), 8), WHOLE]
        assert (reader.tokens_per_block, reader.is_measured) == (8, True)

    def test_what_was_stored_in_another_size_is_void(self, reader):
        reader.read(answer(stored(ONE), first=1))
        assert not reader.is_measured
        lost, stored_again, current = reader.read(answer(stored(block(3, range(8)), parent=1), first=2))
        assert lost == ViewLost("its blocks hold 8 tokens, not 4")
        assert stored_again.tokens_per_block == 8
        assert current == IN_PART

    def test_smaller_ones_show_when_another_follows(self, reader):
        assert reader.read(answer(stored(block(1, [1, 2])), first=1)) == []
        assert reader.read(answer(stored(block(2, [1, 2]), block(3, [3])), first=2)) == [
            BlocksStored(Tier.GPU, None, (2,), array("i", [1, 2]), 2)
        ]

    @pytest.mark.parametrize("tokens", [[1], [1, 2, 3], list(range(6))])
    def test_no_size_is_taken_from_a_block_that_can_be_none(self, reader, tokens):
        assert reader.read(answer(stored(block(1, tokens), ONE), first=1)) == []
        assert reader.tokens_per_block == SIZE


class TestRepeats:
    def test_smaller_windows_are_further_groups(self):
        reader, group = PolledEventReader(SIZE, exact=True), KvGroup(16, Attention.PREFIX)
        assert reader.read(answer(created(), window_size=16)) == [WHOLE]
        assert reader.read(answer(created(20, 8), first=1)) == []
        partial = block(3, range(8, 10))
        assert reader.read(answer(stored(ONE, TWO, partial), first=2, window_size=16)) == [
            BlocksStored(Tier.GPU, None, (1, 2), array("i"), SIZE, group=group)
        ]
        assert reader.read(answer(stored(ONE, TWO), first=3)) == [run((1, 2), range(8))]
        assert reader.read(answer(updated(1, 0, 1), stored(partial), first=4, window_size=16)) == []
        assert reader.read(answer(removed(2), first=6, window_size=16)) == [
            BlocksRemoved(Tier.GPU, (2,), group)
        ]
        assert (reader.follows_all, reader.blocks_per_level) == (True, (20, 8))

    @pytest.mark.parametrize(("window", "fields"), [(16, {"layer_group_id": 1}), (-1, {}), (0, {})])
    def test_what_a_window_holds_may_be_unknown(self, reader, window, fields):
        told = reader.read(answer(stored(ONE) | fields, first=1, window_size=window))
        assert [event.group for event in told] == [KvGroup(window, Attention.UNKNOWN)]
        assert not reader.follows_all
        reader.read(answer(created()))
        assert reader.follows_all

    def test_a_larger_one_that_shows_late_begins_anew(self):
        reader = PolledEventReader(SIZE, exact=True)
        reader.read(answer(stored(ONE), first=3, window_size=16))
        assert reader.read(answer(stored(TWO), first=4)) == [
            ViewLost("a larger attention window of 64 tokens is followed"),
            run((2,), range(4, 8)),
            IN_PART,
        ]

    def test_one_layer_group_is_followed(self, reader):
        grouped = stored(ONE) | {"layer_group_id": 1}
        assert reader.read(answer(grouped, stored(ONE) | {"layer_group_id": 2}, first=1)) == [
            run((1,), range(4))
        ]
        assert reader.read(answer(removed(1), first=3, layer_group_id=2)) == []
        assert reader.read(answer(removed(1), first=4, layer_group_id=1)) == [BlocksRemoved(Tier.GPU, (1,))]

    def test_other_ranks_are_passed_over_and_noted(self, reader):
        assert reader.read(answer(stored(ONE), first=900, attention_dp_rank=1)) == []
        assert reader.read(answer(stored(ONE), first=1, attention_dp_rank=0)) == [run((1,), range(4))]
        assert (reader.ranks, reader.gaps) == ({0, 1}, 0)


class TestUnreadable:
    @pytest.mark.parametrize(
        "data",
        [
            stored(block(1, range(4), cache_level=9)),
            stored(ONE, block(2, range(4), cache_salt="t")),
            stored(block(1, ["a", 1, 2, 3])),
            stored(block(1, [2**40, 1, 2, 3])),
            stored(block(1, []) | {"tokens": [{"token_id": 1, "token_extra_id": -1}] * 4}),
            stored(ONE, block(2, range(4), lora_id=1)),
            updated([], 0, 1),
            updated(1, 0, 1) | {"cache_level": 1},
            stored(ONE, parent=1.5),
            stored(block(1, range(4), cache_salt=7)),
            stored(block(1, range(4), mm_keys=[{"hash": 1, "start_offset": 0}])),
            {"type": "created", "num_blocks_per_cache_level": [None]},
            {"no": "type"},
        ],
    )
    def test_it_is_skipped_and_counted(self, reader, data):
        assert reader.read(answer(data, stored(ONE), first=1)) == [run((1,), range(4))]
        assert (reader.skipped, reader.gaps) == (1, 0)

    def test_a_removal_that_cannot_be_read_voids_what_it_may_mean(self, reader):
        reader.read(answer(stored(ONE), first=1))
        assert reader.read(answer({"type": "removed", "block_hashes": 1}, first=2)) == [
            ViewLost("a removal could not be read"),
            IN_PART,
        ]

    def test_an_event_without_a_number_shows_as_a_gap(self, reader):
        events = json.loads(answer(stored(ONE), stored(TWO), first=1))
        del events[0]["event_id"]
        assert reader.read(json.dumps(events).encode()) == [
            ViewLost("events 1 to 1 were lost"),
            run((2,), range(4, 8)),
            IN_PART,
        ]
        assert reader.skipped == 1

    @pytest.mark.parametrize("content", [b"", b"null", b'{"error": "no"}', b"\xff", b"[" * 100_000])
    def test_an_answer_that_is_none(self, reader, content):
        with pytest.raises(EngineUnavailable):
            reader.read(content)
