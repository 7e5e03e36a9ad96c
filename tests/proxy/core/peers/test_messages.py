import msgspec
import pytest
from msgspec.structs import replace

from engine_adapter import UNREADABLE
from engine_adapter.types import Usage
from proxy.core.index.blocks import Chain
from proxy.core.peers import messages
from proxy.core.peers.messages import (
    Heartbeat,
    KvpinState,
    OwnRequests,
    Placing,
    RequestState,
    ToldEngine,
    UseReport,
    chain_of,
    disagreement,
    frame_of,
    hash_alike,
    match,
    messages_of,
    owner_of,
    packed,
)
from proxy.core.placement.load import Work
from proxy.core.quotas import Use

PLACING = Placing("a", packed([7, 2**64 - 1]), 40, streams=True, known=False, session=2**63)


def test_messages_come_back_as_they_were():
    messages = [
        RequestState(1, Work(8, 16), placing=PLACING),
        RequestState(1, Work(8), 3, usage=Usage(3, 4, (5, 0.5))),
        UseReport("t", Use(1, 2, 3)),
        Heartbeat(packed([2**64 - 1]), 1.5),
    ]
    frame = frame_of(2**63, messages)
    assert owner_of(frame) == 2**63
    assert messages_of(frame) == messages


def test_a_frame_of_another_version_has_no_owner(monkeypatch):
    frame = frame_of(1, [])
    monkeypatch.setattr(messages, "VERSION", b"\xff")
    assert owner_of(frame) is None
    assert owner_of(b"\xff") is None


def begun(id=1, step=0, **changes):  # noqa: A002 - as the field
    """Its fields on the wire, some of them changed."""
    fields = dict(zip(Placing.__struct_fields__, msgspec.structs.astuple(PLACING), strict=True))
    return [0, id, Work(8), step, [*(fields | changes).values()]]


WHOLE, PART = b"12345678", b"123"


@pytest.mark.parametrize(
    "told",
    [
        *(begun(id=-1), begun(step=4), begun(session=-1), begun(hashes=PART)),
        *([7, 1, "a", None, [WHOLE, PART]], [7, 1, "a", None, [WHOLE], PART], [8, PART, 1.0]),
    ],
)
def test_a_number_below_none_or_a_hash_in_part_makes_a_frame_none(told):
    with pytest.raises(msgspec.ValidationError):
        messages_of(frame_of(1, [])[:9] + msgspec.msgpack.encode([told]))


def test_a_prompt_that_is_not_known_has_no_chain():
    assert chain_of(PLACING, 16) == Chain((7, 2**64 - 1), 40, 16)
    assert chain_of(replace(PLACING, hashes=None), 16) is None


def test_a_text_that_is_no_utf_8_makes_a_frame_none():
    """Who may write to a Redis channel ended the exchange by it."""
    frame = frame_of(1, [KvpinState("a name", [])]).replace(b"a name", b"a n\xffme")
    with pytest.raises(UNREADABLE):
        messages_of(frame)


OWN = ToldEngine("gpu", "http://one:8000", False, "m", 16)
COUNTED = ToldEngine("vllm-0", "http://two:8000", False, "m", 16)
LOCAL = ToldEngine("near", "host http://127.0.0.1:8000", True, "m", 16)
RANK = replace(COUNTED, id="vllm-0-dp1", address="http://two:8000 rank 1")
ALL = [OWN, COUNTED, LOCAL]


@pytest.mark.parametrize(
    ("told", "same"),
    [
        (replace(OWN, address="http://10.0.0.1:8000"), OWN),  # the operator gave this id
        (replace(COUNTED, address="http://10.0.0.2:8000"), None),
        (replace(LOCAL, address="elsewhere http://127.0.0.1:8000"), None),
        (replace(OWN, address="elsewhere http://127.0.0.1:8000", is_local=True), None),
        (replace(LOCAL, address="http://10.0.0.3:8000", is_local=False), None),
        (replace(RANK, address="http://10.0.0.2:8000 rank 1"), None),
    ],
    ids=["given", "counted", "local", "local there", "local here", "counted rank"],
)
def test_a_counted_id_or_one_of_a_single_machine_says_nothing(told, same):
    assert match(told, [*ALL, RANK]) is same


@pytest.mark.parametrize("url", ["http://router:80", "host http://127.0.0.1:80"])
def test_of_several_engines_at_one_address_the_id_or_the_model_tells_which(url):
    a, b = (ToldEngine(name, url, False, model, 16) for name, model in (("gw-a", "m"), ("gw-b", "n")))
    counted = [replace(each, id=f"gw-{number}") for number, each in enumerate((a, b))]
    assert [match(each, [b, a]) for each in (a, b)] == [a, b]
    assert match(replace(b, model=None), [a, b]) is b
    assert match(replace(b, id="other"), [a, b]) is b
    assert match(replace(counted[0], model="n"), counted) is counted[1]  # in another order there
    assert match(replace(counted[1], model=None), counted) is counted[1]
    assert match(replace(b, id="other", model="x"), [a, b]) is a


def test_one_counted_id_for_two_engines():
    said = disagreement(replace(COUNTED, address="http://10.0.0.2:8000"), ALL)
    assert said.startswith(
        "engine 'vllm-0' is http://10.0.0.2:8000 there and http://two:8000 here, so it counts as two"
    )


def test_two_addresses_of_single_machines_are_two_engines_whatever_their_ids():
    assert disagreement(replace(LOCAL, address="host http://127.0.0.1:8001"), ALL) is None
    assert disagreement(replace(LOCAL, address="http://10.0.0.3:8000", is_local=False), ALL) is not None


def test_other_hashes_share_only_load():
    assert "only its load is shared" in disagreement(replace(OWN, model="n"), ALL)
    assert not hash_alike(replace(OWN, tokens_per_block=8), OWN)
    assert disagreement(replace(OWN, model=None), ALL) is None  # not connected yet


# --- what a kvpin tells of its own requests ------------------------------------------------------


def made():
    woken = []
    own = OwnRequests(lambda: woken.append(1))
    return own, woken


def begin(own, chain=None, **more):
    return own.begun("a", Work(9), chain, **{"streams": True, "known": True, "session": 5, **more})


def test_a_request_is_told_from_its_begin_to_its_end():
    own, woken = made()
    telling = begin(own, Chain((1, 2), 40, 16))
    telling.tell(work=Work(4))
    telling.tell(step=1)
    telling.ended(4, None)
    begun, *rest = own.take()
    placing = Placing("a", packed([1, 2]), 40, streams=True, known=True, session=5)
    assert begun == RequestState(1, Work(9), placing=placing)
    assert rest == [
        RequestState(1, Work(4)),
        RequestState(1, Work(4), 1),
        RequestState(1, Work(4), 3, computed=4),
    ]
    assert own.take() == []
    assert len(woken) == 1


def test_after_all_was_taken_the_next_message_wakes_again():
    own, woken = made()
    begin(own)
    own.take()
    begin(own, streams=False).tell(step=2)
    assert own.take()[1:] == [RequestState(2, Work(9), 2)]
    assert len(woken) == 2


def test_what_runs_is_told_as_it_is_now():
    own, _ = made()
    begin(own).ended(None, None)
    running, answered = begin(own), begin(own, Chain((3,), 16, 16))
    running.tell(work=Work(1))
    answered.tell(step=2)
    one, two, last = own.in_flight(5.0)
    untimed = Placing("a", None, 0, streams=True, known=False, session=5)
    assert one == RequestState(2, Work(1), 0, untimed)
    assert two == RequestState(3, Work(9), 2, replace(untimed, hashes=packed([3]), n_tokens=16))
    assert last == own.heartbeat(5.0) == Heartbeat(packed([2, 3]), 5.0)
    running.tell(step=1)
    assert next(own.in_flight(5.0)).step == 1
