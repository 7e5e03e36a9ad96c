"""The last requests, for `GET /admin/v1/requests`: prediction, outcome, and why the cache missed.

Memory is limited by a number of records, a number of tokens, and the bytes of bodies (`Sources`).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from engine_adapter import Headers, JsonBody
from engine_adapter.types import Usage
from proxy.core.differences import PROMPT_FIELDS
from proxy.core.index.blocks import Chain
from proxy.core.life import Cause
from proxy.core.misses import Diagnosis
from proxy.core.placement.decision import Placement
from proxy.core.placement.pairs import TransferResult
from proxy.core.reasons import Moments, TtfbPart, parts_of
from proxy.prompt import Prompt
from proxy.request.calls import Call, Session

MAX_TOKENS = 2_000_000
# Characters kept of a client's model name, and of an error, which may repeat what a client or an engine sent.
MAX_NAME, MAX_ERROR = 200, 2_000
MAX_KEY = 1_024  # a longer `prompt_cache_key` is not kept


class RequestFacts(msgspec.Struct):
    """A request as the admin API shows it. Times are in seconds, `started` is Unix time. Each record gets
    lists of its own."""

    request_id: str  # kvpin's own id, unique
    started: float
    route: str
    model: str | None  # the name its client sent; of a long one the beginning
    tenant: str | None
    stream: bool
    # The client's `x-request-id`; several clients may send the same. For one of several parts of a request:
    # the id of the whole.
    client_request_id: str | None = None
    prompt_cache_key: str | None = None
    attempts: list[str] = []  # the engines it was sent to, in order
    status: int | None = None
    reported_tokens: int | None = None  # prompt tokens the engine reused; None where the engine did not tell
    output_tokens: int | None = None  # tokens of the answer; None where the engine did not tell
    # From placement to the first byte. An answer that is no stream has its first byte last.
    first_byte_s: float | None = None
    duration_s: float | None = None
    error: str | None = None
    note: str = ""  # what the engine's adapter says about this answer
    slot: int | None = None  # the slot of its last engine that it ran on; None for an engine without slots
    normalised: list[str] = []  # the rules that changed its prompt, see docs/normalise.md
    # What else kvpin changed in it, left out or turned into text, see docs/reference/fates.md.
    changed: list[str] = []
    queued_s: float | None = None  # how long it waited because all engines were busy; None if it did not
    # How often an engine died in mid-answer. Without an error, another one went on with it.
    interrupted: int = 0
    cause: Cause | None = None  # why it ended, see docs/reference/causes.md; None while it runs
    # The engine that computed its prompt for the one that answered, or failed to; None if none was to. The
    # last attempt counts.
    prefilled_by: str | None = None
    # What came of that: moved, failed (the other engine computed the prompt), late (it did not answer in
    # time); None before that.
    transfer: TransferResult | None = None
    first_leg_s: float | None = None  # how long that engine took
    transfer_s: float | None = None  # from then to the first byte


class RequestRecord(RequestFacts, kw_only=True):
    """One request, filled in as it goes on."""

    # When its body was read, in monotonic seconds.
    arrived: float = msgspec.field(default_factory=time.monotonic)
    came: float | None = None  # when its head was read
    prepared: float | None = None  # when its prompt was tokenised
    # From arrival to the end of the answer. The engine may be busy with the request for longer.
    answered_s: float | None = None
    died: list[str] = []  # the engines that died in mid-answer, in order
    # When it was placed on the engine whose answer began first; None before its answer begins.
    placed: float | None = None
    moments: Moments | None = None  # when it passed each step before its answer began; None before that
    # Engines that were to compute its prompt in attempts that failed, and what came of each.
    past_legs: list[tuple[str, TransferResult]] = []
    # Seconds of the legs on other engines, or by which its engine fetched KV, before it was sent.
    legs_s: float = 0.0
    session: Session | None = None  # the conversation its client says it belongs to
    served_as: str | None = None  # the model of the pool it was sent to
    lora: str | None = None
    prompt: Prompt | None = None
    chain: Chain | None = None  # the prompt's blocks, until the request is over
    placement: Placement | None = None
    events: int = 0  # events of the answer's stream that the client was sent
    headers: Headers | None = None  # the client's, until the request is over
    # The reason of `kvpin_refused_total` for which it reached no engine, if its error tells it.
    refusal: str | None = None
    # Whether the engine made the same tokens of the prompt; None where it did not tell.
    tokens_agree: bool | None = None
    runs_prompt: bool = True  # it had a prompt, whether kvpin knew that or not
    answer_id: str | None = None  # the id that the answer carries, of responses and messages
    called_tool: bool = False  # the answer ended with a tool call
    diagnosis: Diagnosis | None = None  # why no more was reused, once somebody asked

    @classmethod
    def of(cls, call: Call) -> RequestRecord:
        """A new record of a request that has just arrived."""
        key = call.body.hint("prompt_cache_key") if isinstance(call.body, JsonBody) else None
        return cls(
            request_id=call.request_id,
            started=time.time(),
            route=call.route,
            model=call.model[:MAX_NAME] if call.model is not None else None,
            tenant=call.tenant,
            stream=call.streams,
            client_request_id=call.client_id,
            prompt_cache_key=key if isinstance(key, str) and len(key) <= MAX_KEY else None,
            session=call.session,
            runs_prompt=call.runs_prompt,
        )

    def __repr__(self) -> str:
        """Without the prompt, which must not get into logs."""
        return f"RequestRecord({self.request_id!r})"

    @property
    def n_tokens(self) -> int | None:
        """Prompt tokens; None when the prompt is not known."""
        return len(self.prompt.token_ids) if self.prompt is not None else None

    @property
    def engine(self) -> str | None:
        """The engine it was placed on last."""
        return self.placement.engine if self.placement is not None else None

    @property
    def computed_by(self) -> str | None:
        """The engine that computed its prompt, or is to: its cached tokens are that one's."""
        return self.placement.chosen.computed_by if self.placement is not None else None

    @property
    def predicted_tokens(self) -> int | None:
        """Prompt tokens that the engine was expected to reuse."""
        return self.placement.predicted_tokens if self.placement is not None else None

    @property
    def is_firm(self) -> bool | None:
        """False if the engine may reuse another number of tokens than predicted; None if the prompt is not
        known."""
        return self.placement.firm if self.placement is not None and self.prompt is not None else None

    @property
    def expected_first_token_s(self) -> float | None:
        """Seconds from placement to the first token, as expected; None for an unknown prompt, and for
        a stream that began on another engine than it was placed on last."""
        if self.placement is None or self.prompt is None or self.died:
            return None
        return self.placement.chosen.first_token_s

    @property
    def placement_s(self) -> float | None:
        """Seconds that kvpin took to read, tokenise and place it, the wait for busy engines left out. None if
        it had to be placed twice."""
        if self.placed is None or len(self.attempts) != 1:
            return None
        return self.placed - self.arrived - (self.queued_s or 0.0)

    @property
    def first_token_s(self) -> float | None:
        """Seconds from arrival to the first byte of a stream; None for other answers."""
        if not self.stream or self.placed is None or self.first_byte_s is None:
            return None
        return self.placed - self.arrived + self.first_byte_s

    def begins(self, placed: float, gathered: float, sent: float, first_byte_s: float) -> None:
        """Notes that its answer begins, and when it passed the steps before that: see `Moments`."""
        self.placed, self.first_byte_s = placed, first_byte_s
        self.moments = Moments(
            came=self.arrived if self.came is None else self.came,
            arrived=self.arrived,
            prepared=self.arrived if self.prepared is None else self.prepared,
            queued_s=self.queued_s or 0.0,
            placed=placed,
            gathered=gathered,
            legs_s=self.legs_s,
            sent=sent,
            began=placed + first_byte_s,
            has_failed=len(self.attempts) > 1,
            is_whole=not self.stream,
        )

    def leaves_leg(self) -> None:
        """Notes that another attempt begins: the leg of the one that failed is no part of it."""
        if self.prefilled_by is not None and self.transfer is not None:
            self.past_legs.append((self.prefilled_by, self.transfer))
        self.prefilled_by = self.transfer = self.first_leg_s = self.transfer_s = None
        self.legs_s = 0.0

    @property
    def legs(self) -> list[tuple[str, TransferResult]]:
        """The engines that were to compute its prompt for another one, in order, and what came of each."""
        if self.prefilled_by is None or self.transfer is None:
            return self.past_legs
        return [*self.past_legs, (self.prefilled_by, self.transfer)]

    def reports(self, usage: Usage) -> None:
        """Notes the engine's own timings of the answer that has ended."""
        # Of a stream that another engine continued, they are about the rest.
        if self.moments is not None and not self.died:
            self.moments.prefill_s = usage.prefill[1] if usage.prefill is not None else None
            self.moments.decode_s = usage.decode_s

    @property
    def first_byte_parts(self) -> dict[TtfbPart, float] | None:
        """What the time from its head to its first byte was spent on; None without an answer."""
        return None if self.moments is None else parts_of(self.moments)

    @property
    def answer_tokens(self) -> int:
        """Tokens of the answer. If the engine did not report them, as in a stream whose client did not ask
        for the usage, the stream's events are counted: a few more."""
        return self.output_tokens or self.events

    @property
    def per_token_s(self) -> float | None:
        """Mean seconds between the tokens of a stream that ended well."""
        first, whole, tokens = self.first_token_s, self.duration_s, self.answer_tokens
        if first is None or whole is None or tokens <= 1 or self.error is not None:
            return None
        return (whole - first) / (tokens - 1)


def _key(record: RequestRecord) -> str:
    """The key of its body as the rules changed it. As it was sent, it has the request's id."""
    return f"{record.request_id} changed" if record.normalised else record.request_id


class RequestRecords:
    """The last requests, newest last."""

    def __init__(self, capacity: int, *, keeps_bodies: bool = True) -> None:
        """`keeps_bodies`: prompts are known, so that somebody may ask where two bodies differ."""
        self.sources = Sources()  # the bodies of the last requests
        self._keeps_bodies = keeps_bodies and capacity > 0
        self.capacity = capacity
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()
        self._tokens = 0

    def __iter__(self) -> Iterator[RequestRecord]:
        return iter(self._records.values())

    def keep_source(self, record: RequestRecord, raw: bytes) -> None:
        """Keeps the body of a request that will be added, if it has a prompt: as it was sent, and once rules
        changed it also as they did."""
        if self._keeps_bodies and record.runs_prompt:
            self.sources.keep(_key(record), record.tenant, raw)

    def source(self, record: RequestRecord) -> bytes | None:
        """The body of a request as kvpin's rules changed it; None if it is not known."""
        return self.sources.raw(_key(record), record.tenant)

    def fields(self, record: RequestRecord, *, as_sent: bool = False) -> dict[str, Any] | None:
        """The fields that make its prompt, as kvpin's rules changed them, or as its client sent them; None if
        they are not known."""
        return self.sources.fields(record.request_id if as_sent else _key(record), record.tenant)

    def add(self, record: RequestRecord) -> None:
        """Keeps a finished request. Drops the oldest when there is no room."""
        self._records[record.request_id] = record
        record.error = record.error and record.error[:MAX_ERROR]
        self._tokens += record.n_tokens or 0
        while len(self._records) > self.capacity or (self._tokens > MAX_TOKENS and len(self._records) > 1):
            _, dropped = self._records.popitem(last=False)
            self._tokens -= dropped.n_tokens or 0
            for key in {dropped.request_id, _key(dropped)}:
                self.sources.drop(key, dropped.tenant)

    def get(self, request_id: str, tenant: str | None = None) -> RequestRecord | None:
        """The request with that id of kvpin's, or the newest with that id of its client's; else the newest
        with the one id that begins so, with or without the "req-" of kvpin's. `tenant` limits the search to
        that tenant's requests."""
        own = self._records.get(request_id)
        for record in (own,) if own is not None else reversed(self._records.values()):
            is_meant = request_id in (record.request_id, record.client_request_id)
            if is_meant and tenant in (None, record.tenant):
                return record
        found: dict[str, RequestRecord] = {}
        for record in self._records.values() if request_id and own is None else ():
            ids = record.client_request_id or "", record.request_id
            begins = next((each for each in ids if each.startswith((request_id, f"req-{request_id}"))), None)
            if begins is not None and tenant in (None, record.tenant):
                found[begins] = record
        return next(iter(found.values())) if len(found) == 1 else None

    def answered(self, answer_id: str, tenant: str | None) -> RequestRecord | None:
        """The tenant's request whose answer has that id, in its body or as its `x-request-id`."""
        for record in reversed(self._records.values()):
            ids = record.answer_id, record.request_id, record.client_request_id
            if answer_id in ids and record.tenant == tenant:
                return record
        return None

    def last_prompt(self, prompt_cache_key: str, tenant: str | None) -> tuple[str | None, Prompt] | None:
        """Model or LoRA adapter, and prompt, of the newest request with that `prompt_cache_key`."""
        for record in reversed(self._records.values()):
            if record.prompt_cache_key == prompt_cache_key and record.prompt and record.tenant == tenant:
                return record.lora or record.served_as, record.prompt
        return None


LIMIT_BYTES = 16 << 20
# A larger body is mostly images. Then only the tokens show where it differs.
MOST_BYTES = 1 << 20
_NOTHING: Mapping[str, bytes] = {}


class Sources:
    """Request id → body. Reasoning is kept in one of its own: key of the answer → reasoning."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES, overhead: int = 0) -> None:
        """`overhead`: bytes that each entry counts beside its own, where many are short."""
        self._limit, self._overhead = limit_bytes, overhead
        self._shares: dict[str | None, OrderedDict[str, bytes]] = {}
        self._sizes: dict[str | None, int] = {}
        self.n_bytes = 0

    def keep(self, request_id: str, tenant: str | None, raw: bytes) -> None:
        """Keeps a body in place of an earlier one of the request, unless it is too large."""
        share = self._shares.get(tenant)
        if share is not None and request_id in share:
            self.drop(request_id, tenant)
        if len(raw) > MOST_BYTES or len(raw) > self._limit:
            return
        if share is None or not share:
            share = self._shares[tenant] = OrderedDict()
        share[request_id] = raw
        self._count(tenant, len(raw) + self._overhead)
        while self.n_bytes > self._limit:
            greediest = max(self._sizes, key=self._sizes.__getitem__)
            self.drop(next(iter(self._shares[greediest])), greediest)

    def fields(self, request_id: str, tenant: str | None) -> dict[str, Any] | None:
        """The fields of a request that make its prompt; None if its body is not known."""
        if (raw := self.raw(request_id, tenant)) is None:
            return None
        body = JsonBody(raw)
        return {name: body.hint(name) for name in PROMPT_FIELDS if name in body}

    def raw(self, request_id: str, tenant: str | None) -> bytes | None:
        """The body of a request; None if it is not known."""
        return self._shares.get(tenant, _NOTHING).get(request_id)

    def drop(self, request_id: str, tenant: str | None) -> None:
        """Forgets a body, if it is known."""
        share = self._shares.get(tenant)
        if share is None or (raw := share.pop(request_id, None)) is None:
            return
        self._count(tenant, -len(raw) - self._overhead)
        if not share:
            del self._shares[tenant], self._sizes[tenant]

    def _count(self, tenant: str | None, n_bytes: int) -> None:
        self._sizes[tenant] = self._sizes.get(tenant, 0) + n_bytes
        self.n_bytes += n_bytes
