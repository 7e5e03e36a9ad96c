"""The messages between kvpins, as MessagePack, and which kvpin owns an engine that only one may use."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace

from engine_adapter.types import Role, Usage
from proxy.core.books import EngineMark
from proxy.core.index.blocks import BlockHash, Chain
from proxy.core.placement.load import Work
from proxy.core.placement.rates import Timings
from proxy.core.quotas import Use

# --- decides which of several kvpins owns an engine that only one may use -------------------------------
#     free ──bid──→ bidding ──SETTLE_S without a better claim──→ owner
#     any ──a better claim of another kvpin──→ free
#
# The better of two claims is the one whose kvpin uses the engine; then the one with the greater epoch; then
# the one whose kvpin drew the smaller number. A bid has a greater epoch than all known claims. So an owner
# stays when other kvpins join. If two kvpins
# became owners without contact, the later one stays. A claim ends with its kvpin.

# A kvpin bids for that long before it is the owner: longer than a message to another one and its answer take.
SETTLE_S = 1.0


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """A kvpin's claim to an engine: its epoch, and whether the kvpin uses the engine or still bids for it."""

    epoch: int
    is_held: bool


class OwnClaim:
    """This kvpin's claim to one engine."""

    def __init__(self, kvpin: int) -> None:
        """`kvpin` is the number that this kvpin drew."""
        self.is_owner = False  # this kvpin may use the engine
        self.is_locked_out = False  # a kvpin that could not be heard holds the engine's lock
        self._kvpin = kvpin
        self._epoch = 0  # of its own claim; without one, the greatest that was heard of
        self._since: float | None = None  # when it bid; None without a claim

    @property
    def claim(self) -> Claim | None:
        """The claim as the others are told it; None without one."""
        if self._since is None:
            return None
        return Claim(self._epoch, self.is_owner and not self.is_locked_out)

    @property
    def is_bidding(self) -> bool:
        """True if it waits for a better claim."""
        return self._since is not None and not self.is_owner

    def decide(
        self, now: float, others: Mapping[int, Claim], *, may_bid: bool, is_alone: bool = False
    ) -> None:
        """Bids, becomes the owner, or gives up, at `now` in monotonic seconds. `others`: the claims of the
        kvpins that were heard lately, by the numbers that they drew. `may_bid`: they would hear the bid, or a
        lock keeps the engine from a second owner. `is_alone`: there is no other kvpin."""
        if (own := self.claim) is not None and any(
            _rank(claim, kvpin) > _rank(own, self._kvpin) for kvpin, claim in others.items()
        ):
            self._since, self.is_owner = None, False
        if self._since is None:
            self._epoch = max([self._epoch, *(claim.epoch for claim in others.values())])
            if others or not may_bid:
                return
            self._epoch, self._since = self._epoch + 1, now
        if is_alone or now - self._since >= SETTLE_S:
            self.is_owner = True

    def doubt(self, now: float) -> None:
        """This kvpin was paused: another one may own the engine by now. It bids again."""
        if self.is_owner:
            self.is_owner, self._since = False, now


def holder_of(claims: Mapping[int, Claim]) -> int | None:
    """The kvpin that uses an engine, by the claims to it; None if none does."""
    held = {kvpin: claim for kvpin, claim in claims.items() if claim.is_held}
    return max(held, key=lambda kvpin: _rank(held[kvpin], kvpin), default=None)


def _rank(claim: Claim, kvpin: int) -> tuple[bool, int, int]:
    return claim.is_held, claim.epoch, -kvpin


# --- the messages between kvpins, as MessagePack --------------------------------------------------------
#     frame = version, owner, messages that were sent together
#
# Frames may be lost: a heartbeat names the requests that go on, and so mends what was missed. Prompts are
# told as block hashes, conversations as digests. No text of a prompt leaves a kvpin.

# Kvpins of other versions of this format do not understand each other: they ignore each other's frames.
VERSION = b"\x04"
_OWNER_BYTES = 8
_HEAD = len(VERSION) + _OWNER_BYTES


_Number = Annotated[int, msgspec.Meta(ge=0)]  # what `packed` takes, and a digest of ids
_HASH_BYTES = 8  # bytes of a packed hash or digest


def _check_packed(data: bytes) -> None:
    if len(data) % _HASH_BYTES:
        raise ValueError("packed hashes must have 8 bytes each")


class _Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    pass


class Step(IntEnum):
    """How far a request is: its answer has not begun, streams after its first token, came whole; or it is
    over."""

    PLACED = 0
    STREAMS = 1
    ANSWERED = 2
    OVER = 3


class Placing(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How a request was placed, which does not change."""

    engine: str  # its id at the sender
    hashes: bytes | None  # the request's blocks, see `packed`; None if its prompt is not known
    n_tokens: int
    streams: bool  # its answer is a stream
    known: bool  # all its tokens are known, so rates may be learned from its times
    session: _Number | None  # digest of its conversation; None without one
    part: Role = Role.BOTH  # the part of the request that the engine got

    def __post_init__(self) -> None:
        """Raises ValueError for hashes that are not whole: nothing of their frame counts."""
        _check_packed(self.hashes or b"")


class RequestState(_Message, tag=0, frozen=True):
    """A request as it is now: a message that is repeated changes nothing, and each makes up for lost ones."""

    id: _Number  # its number at the kvpin that placed it
    work: Work  # its work before the first token
    step: Step = Step.PLACED
    placing: Placing | None = None  # where it runs; None if the sender has told that before
    # Tokens of its prompt that are new on the engine; None before it is over, and if it failed.
    computed: int | None = None
    usage: Usage | None = None


class UseReport(_Message, tag=4, frozen=True):
    """A tenant's use of its limits since the last such message."""

    tenant: str
    use: Use


class ToldEngine(msgspec.Struct, frozen=True, array_like=True):
    """An engine as a kvpin knows it."""

    id: str  # the name that it has there
    # Its URL. One that only the kvpin's own machine can reach has that machine's name in front. A
    # data-parallel rank has its number behind.
    address: str
    is_local: bool  # only that machine can reach it
    model: str | None  # its pool; None while it is not connected
    tokens_per_block: int | None  # the pool's
    claim: Claim | None = None  # the sender's claim to it; None without one


class ToldPin(msgspec.Struct, frozen=True, array_like=True):
    """A pin that a kvpin holds."""

    pin_id: str
    engines: list[str]  # their ids at the sender
    blocks: int
    expires: float  # when it ends, in Unix time
    label: str  # the operator's description; never prompt text


class KvpinState(_Message, tag=5, frozen=True):
    """The sender as it is now."""

    name: str  # for people
    engines: list[ToldEngine]
    # The path of the socket on which it serves HTTP to peers; None if there is none.
    http_socket: str | None = None
    marks: list[EngineMark] = msgspec.field(default_factory=list)  # what operators have ordered about engines
    pins: list[ToldPin] = msgspec.field(default_factory=list)  # the pins that it holds
    keys: bytes = b""  # the book of issued keys, see `signed`; empty if none was issued
    secret: bytes = b""  # tells the secret of its hashes from others, see `Fleet.secret_name`


class Ask(_Message, tag=6, frozen=True):
    """Asks the kvpin `of` for all its requests in flight. With `contents`, also for the learned contents of
    engines without events, and for the engines of conversations."""

    of: int
    contents: bool


class Contents(_Message, tag=7, frozen=True):
    """A part of what an engine holds, for the kvpin `to`."""

    to: int
    engine: str | None = None  # its id at the sender; None when all engines were told
    timings: Timings | None = None  # its speed
    # Consecutive blocks of one chain each that an engine without events probably holds, see `packed`; the
    # last to be evicted first.
    stretches: list[bytes] = msgspec.field(default_factory=list)
    sessions: bytes = b""  # digests of conversations whose last engine it is, packed; the last first

    def __post_init__(self) -> None:
        """Raises ValueError for hashes that are not whole."""
        for each in (*self.stretches, self.sessions):
            _check_packed(each)


class Heartbeat(_Message, tag=8, frozen=True):
    """The sender lives, and so do these of its requests, by their ids, see `packed`: all others are over.
    `sent`: when, by the sender's clock, in seconds."""

    requests: bytes
    sent: float

    def __post_init__(self) -> None:
        """Raises ValueError for ids that are not whole."""
        _check_packed(self.requests)


class Leaving(_Message, tag=9, frozen=True):
    """The sender stops: all its requests are over."""


Message = RequestState | UseReport | KvpinState | Ask | Contents | Heartbeat | Leaving

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Message]).decode


def frame_of(owner: int, messages: Sequence[Message]) -> bytes:
    """The bytes of messages. `owner` is the number that the sender drew when it started."""
    return VERSION + owner.to_bytes(_OWNER_BYTES, "little") + _encode(messages)


def owner_of(frame: bytes) -> int | None:
    """The sender of a frame; None if the frame has another version."""
    if len(frame) < _HEAD or not frame.startswith(VERSION):
        return None
    return int.from_bytes(frame[len(VERSION) : _HEAD], "little")


def messages_of(frame: bytes) -> list[Message]:
    """The messages of a frame. Raises one of `UNREADABLE` if it has none."""
    return _decode(memoryview(frame)[_HEAD:])


def packed(hashes: Iterable[BlockHash]) -> bytes:
    """Block hashes or digests as bytes, 8 each."""
    return array("Q", hashes).tobytes()


def unpacked(data: bytes) -> tuple[BlockHash, ...]:
    """The hashes of `packed`."""
    return tuple(memoryview(data).cast("Q"))


def chain_of(placing: Placing, tokens_per_block: int) -> Chain | None:
    """The prompt of a request; None if it is not known."""
    if placing.hashes is None:
        return None
    return Chain(unpacked(placing.hashes), placing.n_tokens, tokens_per_block)


# --- which engines of two kvpins are the same ---------------------------------------------------------------


_COUNTED = re.compile(r"[a-z][a-z0-9_-]*-\d+(-dp\d+)?")


def match(told: ToldEngine, own: Iterable[ToldEngine]) -> ToldEngine | None:
    """The own engine that equals a peer's engine; None without one. Of several at one address, e.g. the
    models of a router, it is the one with the same id, unless that is counted; then with the same model."""
    own, is_given = list(own), _COUNTED.fullmatch(told.id) is None
    if there := [each for each in own if each.address == told.address]:
        return max(there, key=lambda each: _likeness(told, each, is_given=is_given))
    named = (each for each in own if each.id == told.id and not (each.is_local or told.is_local))
    return next(named, None) if is_given else None


def _likeness(told: ToldEngine, own: ToldEngine, *, is_given: bool) -> tuple[bool, bool, bool]:
    has_id, has_model = own.id == told.id, told.model is not None and own.model == told.model
    return is_given and has_id, has_model, has_id


def hash_alike(told: ToldEngine, own: ToldEngine) -> bool:
    """True if both kvpins make the same block hashes of a prompt for this engine."""
    return (told.model, told.tokens_per_block) == (own.model, own.tokens_per_block)


def disagreement(told: ToldEngine, own: Iterable[ToldEngine]) -> str | None:
    """One sentence about settings of two kvpins that disagree; None if none do."""
    own = list(own)
    mine = match(told, own)
    if mine is None:
        same = next((each for each in own if each.id == told.id), None)
        if same is None or (same.is_local and told.is_local):
            return None  # single machines reach them: they are two, and a port may just have changed
        return (
            f"engine {told.id!r} is {told.address} there and {same.address} here, so it counts as two; "
            "give both kvpins the same address, or an id of your own"
        )
    if None in (told.model, mine.model) or hash_alike(told, mine):
        return None
    return (
        f"engine {mine.id!r} serves {told.model!r} in blocks of {told.tokens_per_block} tokens there and "
        f"{mine.model!r} in blocks of {mine.tokens_per_block} here: only its load is shared; "
        "give both kvpins the same engines and models"
    )


# --- what a kvpin tells of its own requests -----------------------------------------------------------------


class Telling:
    """Tells of one request, from its placement to its end."""

    __slots__ = ("_own", "_placing", "_state")

    def __init__(self, own: OwnRequests, state: RequestState, placing: Placing) -> None:
        self._own, self._state = own, state
        self._placing = replace(placing, known=False)  # who hears of it later does not know its times
        own.tell(replace(state, placing=placing))

    def ended(self, computed: int | None, usage: Usage | None) -> None:
        """It is over, see `Placer.end`."""
        self._own.forget(self._state.id)
        self.tell(step=Step.OVER, computed=computed, usage=usage)

    def tell(self, **changes: Any) -> None:  # noqa: ANN401 - fields of a state
        """Its state is another one: its work, or how far it is."""
        self._state = replace(self._state, **changes)
        self._own.tell(self._state)

    def now(self) -> RequestState:
        """The request as it is now, for a peer that does not know it."""
        return replace(self._state, placing=self._placing)


class OwnRequests:
    """The requests that this kvpin has in flight, and what is still to be told."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is called when there is something to tell, once until that is taken."""
        self._wake = wake
        self._untold: list[Message] = []
        self._in_flight: dict[int, Telling] = {}
        self._last = 0  # id

    def begun(
        self,
        engine: str,
        work: Work,
        chain: Chain | None,
        *,
        streams: bool,
        known: bool,
        session: int | None,
        part: Role = Role.BOTH,
    ) -> Telling:
        """Tells that a request, or a `part` of it, was placed. Returns the object that tells its further
        steps."""
        self._last += 1
        hashes, n_tokens = (packed(chain.hashes), chain.n_tokens) if chain is not None else (None, 0)
        placing = Placing(engine, hashes, n_tokens, streams, known, session, part)
        telling = self._in_flight[self._last] = Telling(self, RequestState(self._last, work), placing)
        return telling

    def tell(self, message: Message) -> None:
        """Adds a message to the next frame."""
        if not self._untold:
            self._wake()
        self._untold.append(message)

    def forget(self, request: int) -> None:
        """A request is over."""
        del self._in_flight[request]

    def take(self) -> list[Message]:
        """Takes the messages that were not sent yet."""
        untold, self._untold = self._untold, []
        return untold

    def in_flight(self, now: float) -> Iterator[Message]:
        """All requests in flight, for a peer that does not know them, and the heartbeat that names them."""
        for telling in self._in_flight.values():
            yield telling.now()
        yield self.heartbeat(now)

    def heartbeat(self, now: float) -> Heartbeat:
        """The sign of life of this kvpin and of its requests."""
        return Heartbeat(packed(self._in_flight), now)
