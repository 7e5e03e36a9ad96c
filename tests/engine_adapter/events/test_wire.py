"""The wire form of KV events, both ways, and what happens to bytes that are not that."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.events import fields as fields_module
from engine_adapter.events.fields import (
    BlockKeys,
    ClearedFields,
    MalformedEvents,
    RemovedFields,
    StoredFields,
    decode_fields,
    read_vllm_keys,
)
from engine_adapter.events.wire import (
    NOT_FOLLOWED,
    EventReader,
    ReportedGroups,
    decode_snapshot,
    encode_batch,
    event_fields,
)
from engine_adapter.types import (
    Attention,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    KvGroup,
    Tier,
    extra_array,
    token_array,
)
from tests.kv_batches import EventBatch, decode_batch

PLAIN = BlocksStored(Tier.GPU, None, (11, 12), token_array([1, 2, 3, 4]), 2)
SALTED = BlocksStored(
    Tier.HOST, None, (21, 22), token_array([1, 2, 900, 4]), 2, extra_array([0, 0, 2**64 - 1, 0]), "tenant-Ü"
)
CHILD = BlocksStored(Tier.DISK, 22, (23,), token_array([5, 6]), 2)
# A timestamp that makes a batch too long for one pass.
LONG = b"x" * 20_000
REMOVED = BlocksRemoved(Tier.HOST, (21, b"\x01"))


def wire(*events, timestamp=1.5):
    return msgspec.msgpack.encode([timestamp, list(events), 0])


def stored(**changes):
    fields = {
        "type": "BlockStored",
        "block_hashes": [1],
        "parent_block_hash": None,
        "token_ids": [7, 8],
        "block_size": 2,
    }
    return fields | changes


def as_array(fields):
    """The array form, with every place filled."""
    names = {"BlockStored": StoredFields, "BlockRemoved": RemovedFields, "AllBlocksCleared": ClearedFields}
    return [fields["type"], *(fields.get(name) for name in names[fields["type"]].__struct_fields__[:10])]


def test_a_long_batch_is_decoded_event_by_event(monkeypatch):
    """So that others get a turn before it is read to its end."""
    decoded = []
    monkeypatch.setattr(fields_module, "_map", lambda raw: decoded.append(raw) or StoredFields((1,)))
    events = decode_fields(wire(stored(), stored(), timestamp=LONG))
    assert next(events) == StoredFields((1,))
    assert len(decoded) == 1


def test_the_payload_is_as_the_wire_document_says():
    timestamp, (event, removed), rank = msgspec.msgpack.decode(encode_batch([SALTED, REMOVED], timestamp=2.5))
    assert (timestamp, rank) == (2.5, 0)
    assert event == {
        "type": "BlockStored",
        "block_hashes": [21, 22],
        "parent_block_hash": None,
        "token_ids": [1, 2, 900, 4],
        "block_size": 2,
        "medium": "CPU",
        "extra_keys": [
            [["cache_salt", "tenant-Ü"]],
            [["extra_ids", b"\xff" * 8 + bytes(8)]],
        ],
    }
    assert removed == {"type": "BlockRemoved", "block_hashes": [21, b"\x01"], "medium": "CPU"}


def test_removals_that_follow_each_other_are_one_event_and_many_are_several():
    """vLLM sends one for each block that it evicts. Their order among the others stays."""
    gone = [BlocksRemoved(Tier.GPU, (n,)) for n in range(100)]
    events = [*gone[:3], REMOVED, PLAIN, *gone, CacheCleared(), gone[0]]
    first, last = BlocksRemoved(Tier.GPU, (0, 1, 2)), BlocksRemoved(Tier.GPU, tuple(range(64, 100)))
    many = BlocksRemoved(Tier.GPU, tuple(range(64)))
    read = decode_batch(encode_batch(events, timestamp=1.0)).events
    assert read == (first, REMOVED, PLAIN, many, last, CacheCleared(), gone[0])


def page(name, parent, **changes):
    fields = {"tier": Tier.GPU, "token_ids": token_array([name]), "tokens_per_block": 1} | changes
    return BlocksStored(parent=parent, hashes=(name,), **fields)


def test_pages_that_follow_each_other_are_one_run():
    """SGLang sends one event for each."""
    pages = [page(n, n - 1, lora="ada") for n in range(1, 5)]
    reader = EventReader(lambda fields: BlockKeys(lora="ada"))
    (run,) = reader.read(encode_batch(pages, timestamp=1.0))
    assert run == BlocksStored(Tier.GPU, 0, (1, 2, 3, 4), token_array([1, 2, 3, 4]), 1, None, None, "ada")


REMOVED_PAGE = BlocksRemoved(Tier.GPU, (1,))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(page(1, None), page(2, 1), id="begins a prompt"),
        pytest.param(page(1, 0), page(2, 7), id="another parent"),
        pytest.param(page(1, 0), page(2, 1, tier=Tier.HOST), id="tier"),
        pytest.param(page(1, 0), page(2, 1, tokens_per_block=2, token_ids=token_array([1, 2])), id="size"),
        pytest.param(page(1, 0), page(2, 1, extra_ids=extra_array([5])), id="an image"),
        pytest.param(page(1, 0, extra_ids=extra_array([5])), page(2, 1), id="after an image"),
        pytest.param(page(1, 0), page(2, 1, salt="s"), id="salt"),
        pytest.param(page(1, 0), page(2, 1, token_ids=token_array([])), id="a name"),
        pytest.param(page(1, 0), REMOVED_PAGE, id="stored, removed"),
        pytest.param(REMOVED_PAGE, page(2, 1), id="removed, stored"),
        pytest.param(REMOVED_PAGE, BlocksRemoved(Tier.HOST, (1,)), id="removed elsewhere"),
    ],
)
def test_events_that_do_not_belong_together_stay_apart(first, second):
    assert decode_batch(encode_batch([first, second], timestamp=1.0)).events == (first, second)


@pytest.mark.parametrize("size", [2, 0, None])
def test_offload_may_name_blocks_without_their_tokens_and_their_size(size):
    (event,) = decode_batch(wire(stored(token_ids=[], medium="CPU", block_size=size))).events
    assert event == BlocksStored(Tier.HOST, None, (1,), token_array([]), size or 0)


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        (None, Tier.GPU),
        ("GPU", Tier.GPU),
        ("CPU", Tier.HOST),
        ("cpu", Tier.HOST),
        ("CPU_PINNED", Tier.HOST),
        ("DISK", Tier.DISK),
        ("STORAGE", Tier.DISK),
        ("EXTERNAL", Tier.DISK),
    ],
)
def test_every_medium_is_a_tier(medium, tier):
    removed = {"type": "BlockRemoved", "block_hashes": [1], "medium": medium}
    assert [event.tier for event in decode_batch(wire(stored(medium=medium), removed)).events] == [tier] * 2


def test_of_a_connector_below_the_gpu_each_event_is_a_chunk():
    kind = {"medium": "CPU", "kv_cache_spec_kind": "full_attention", "group_idx": 0}
    first = stored(block_hashes=[1, 2], token_ids=[7, 8, 9, 10], **kind)
    second = stored(block_hashes=[3, 4], token_ids=[1, 2, 3, 4], parent_block_hash=2, **kind)
    events = list(EventReader().read(wire(first, second)))
    assert [(event.hashes, event.per_chunk) for event in events] == [((1, 2), 2), ((3, 4), 2)]
    named = list(EventReader(read_vllm_keys).read(wire(first, second)))  # its events have no keys
    assert [(len(event.token_ids), event.per_chunk) for event in named] == [(0, 2), (0, 2)]
    on_gpu = list(EventReader().read(wire({**first, "medium": "GPU"})))
    assert [event.per_chunk for event in on_gpu] == [1]


def test_fields_from_a_later_version_are_fine_and_its_event_types_are_counted():
    batch = decode_batch(wire(stored(locality="LOCAL", colour=7), {"type": "BlockMoved", "colour": 7}))
    assert batch.events == (BlocksStored(Tier.GPU, None, (1,), token_array([7, 8]), 2),)
    assert batch.skipped == 1


@pytest.mark.parametrize("name", [0, 2**64 - 1, -(2**63), b"", b"\x00" * 32])
def test_names_are_integers_of_either_sign_or_bytes(name):
    (event,) = decode_batch(wire(stored(block_hashes=[name], parent_block_hash=name))).events
    assert (event.parent, event.hashes) == (name, (name,))


def test_events_of_further_groups_name_their_blocks():
    """Whatever tokens they have: those of sliding windows tell of fewer blocks than of tokens."""
    full = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 4}
    reader = EventReader()
    gone = [{"type": "BlockRemoved", "block_hashes": [n], "group_idx": n} for n in (0, 1)]
    events = tuple(reader.read(wire(stored(**full), stored(**window, token_ids=[1, 2, 3, 4, 5]), *gone)))
    group = KvGroup(1, Attention.WINDOW, 4)
    assert events == (
        BlocksStored(Tier.GPU, None, (1,), token_array([7, 8]), 2),
        BlocksStored(Tier.GPU, None, (1,), token_array([]), 2, group=group),
        BlocksRemoved(Tier.GPU, (0,)),
        BlocksRemoved(Tier.GPU, (1,), group),
    )
    assert reader.skipped == 0


@pytest.mark.parametrize("timestamp", [1.5, LONG], ids=["short", "long"])
@pytest.mark.parametrize("form", [lambda event: event, as_array], ids=["maps", "arrays"])
def test_a_batch_means_the_same_in_either_form_however_long_it_is(form, timestamp):
    events = [event_fields(event) for event in (PLAIN, SALTED, CHILD, REMOVED, CacheCleared())]
    batch = decode_batch(wire(*map(form, events), timestamp=timestamp))
    assert batch == EventBatch((PLAIN, SALTED, CHILD, REMOVED, CacheCleared()))


@pytest.mark.parametrize("timestamp", [1.5, LONG], ids=["short", "long"])
@pytest.mark.parametrize(
    "bad",
    [
        stored(extra_keys=[["tenantA"]]),  # untagged: could be a salt or an adapter
        stored(extra_keys=[[["lora", "ada"]]]),
        stored(extra_keys=[[["extra_ids", b"short"]]]),
        stored(extra_keys=[[["cache_salt", 5]]]),
        stored(extra_keys=[None, None]),
        stored(block_hashes=[1, 2], token_ids=[1, 2, 3, 4], extra_keys=[None, [["cache_salt", "late"]]]),
        stored(block_hashes="1"),
        stored(block_size=0),
        stored(token_ids=[1, "2"]),
        stored(token_ids=[1, 2**40]),
        stored(token_ids=None),
        stored(parent_block_hash="x"),
        stored(medium="TAPE"),
        {"type": "BlockMoved"},
        [],
    ],
)
def test_an_unreadable_event_is_skipped_and_the_others_kept(bad, timestamp):
    batch = decode_batch(wire(bad, {"type": "AllBlocksCleared"}, timestamp=timestamp))
    assert batch.events == (CacheCleared(),)
    assert batch.skipped == 1


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", wire()[:-1], msgspec.msgpack.encode({"a": 1}), b"\x91\x01", b"\x91" * 100_000],
    ids=["empty", "no msgpack", "cut off", "a map", "without events", "deep"],
)
def test_a_payload_that_is_no_batch(payload):
    with pytest.raises(MalformedEvents):
        decode_batch(payload)


@given(st.binary(max_size=200))
def test_any_bytes_give_a_batch_or_malformed(payload):
    with contextlib.suppress(MalformedEvents):
        decode_batch(payload)


@pytest.mark.parametrize("payload", [b"", b"\xc1", wire(), msgspec.msgpack.encode([0, [5]])])
def test_a_snapshot_that_cannot_be_read_whole_is_refused(payload):
    with pytest.raises(MalformedEvents):
        decode_snapshot(payload)


token = st.integers(0, 2**31 - 1)


@given(
    st.integers(0, 3).flatmap(
        lambda log: st.tuples(
            st.just(2**log),
            st.integers(1, 5).flatmap(lambda n: st.lists(token, min_size=n * 2**log, max_size=n * 2**log)),
        )
    ),
    st.data(),
)
def test_any_run_of_blocks_survives(run, data):
    size, tokens = run
    blocks = len(tokens) // size
    ids = data.draw(
        st.none()
        | st.lists(st.integers(0, 2**64 - 1), min_size=len(tokens), max_size=len(tokens)).filter(any)
    )
    event = BlocksStored(
        data.draw(st.sampled_from(Tier)),
        data.draw(st.none() | st.integers(0, 2**64 - 1)),
        tuple(data.draw(st.lists(st.integers(0, 2**64 - 1), min_size=blocks, max_size=blocks))),
        token_array(tokens),
        size,
        None if ids is None else extra_array(ids),
        data.draw(st.none() | st.text(min_size=1)),
    )
    assert decode_batch(encode_batch([event], timestamp=0.0)).events == (event,)


def store(group=None, kind=None, tokens=(1, 2), window=None):
    return StoredFields(
        (1,),
        token_ids=list(tokens),
        group_idx=group,
        kv_cache_spec_kind=kind,
        kv_cache_spec_sliding_window=window,
    )


def remove(group=None):
    return RemovedFields((1,), group_idx=group)


WINDOW = KvGroup(0, Attention.WINDOW, 128)
FULL = (store(0, "full_attention"), None)


@pytest.mark.parametrize(
    ("told", "known"),
    [
        # Full attention is the main group, wherever it stands; a second one is a further group.
        *(
            ([(store(0, "sliding_window", window=128), WINDOW), (store(1, kind), None)], True)
            for kind in ("full_attention", "mla_attention", "sink_full_attention")
        ),
        (
            [
                (store(0, "sliding_window", window=128), WINDOW),
                (store(1, "full_attention"), None),
                (store(2, "mamba"), KvGroup(2, Attention.STATE)),
                (remove(1), None),
                (remove(0), WINDOW),
            ],
            True,
        ),
        ([FULL, (store(1, "full_attention"), KvGroup(1, Attention.PREFIX))], True),
        # A group without a kind is known by its content.
        ([(store(0), None), (store(0, tokens=()), None)], True),
        # A model whose layers all have a window has no main group: what it holds is not followed.
        ([(store(0, "sliding_window", window=128), WINDOW)], False),
        # A removal before the first store is of no known group, and so are odd numbers.
        ([(remove(1), NOT_FOLLOWED), FULL], True),
        *(([FULL, (store(odd, "full_attention"), NOT_FOLLOWED)], True) for odd in ([], {}, "x", 2.5)),
        # Other kinds, and a window without its size.
        *(
            ([FULL, (store(1, kind, tokens=()), KvGroup(1, Attention.UNKNOWN))], False)
            for kind in ("cross_attention", "unknown", "of the future", None, 7)
        ),
        *(
            ([FULL, (store(1, kind, window=window), KvGroup(1, Attention.UNKNOWN))], False)
            for kind in ("sliding_window", "chunked_local_attention", "sliding_window_mla")
            for window in (None, 0, -1, "4", 2.5)
        ),
    ],
)
def test_which_group_an_event_is_of_and_whether_all_groups_are_known(told, known):
    groups = ReportedGroups()
    assert [groups.group_of(event) for event, _ in told] == [group for _, group in told]
    assert groups.are_known is known
