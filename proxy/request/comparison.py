"""Compares a request with an earlier one of its tenant, to tell why its cache missed.

Prompts and fields are the client's, and may have very many values. They are compared once, in a thread
(`engine_adapter/off_loop.py`): what follows from the result takes no time.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from engine_adapter import EngineInfo, common_prefix
from engine_adapter.off_loop import off_loop
from proxy.core.differences import CONTINUED, Difference, are_alike, cause_as_sent, difference
from proxy.core.misses import REPEATED, Compared, Diagnosis
from proxy.prompt import Prompt
from proxy.request.records import RequestRecord, RequestRecords

_LOOKS = 16  # requests that share less than a block with all others are compared with this many by their text
# kvpin notices a restart at the next health check. A request may come earlier and miss its cache.
_NOTICED_S = 10.0
# Tokens that two prompts both have behind their first difference are estimated from so many samples of so
# many tokens. Bytes may match between two tokens, too; a prompt that is made of such matches must not cost
# more than these tries.
_SAMPLES, _SAMPLE_TOKENS, _TRIES = 32, 16, 8

Diagnose = Callable[[int | None], Diagnosis]
"""Why no more of a prompt was reused, where the engine reports that many reused tokens; None: as predicted.
It may be asked for each event of a stream."""


class Flush(NamedTuple):
    """A flush that this kvpin ordered: when, in Unix time, and of which prefix or salts; the salt None stands
    for all KV."""

    at: float
    prefix: Prompt | None
    salts: frozenset[str | None] = frozenset()

    def concerns(self, prompt: Prompt, block: int) -> bool:
        """True if it dropped KV of the prompt, whose engine has such blocks."""
        if self.prefix is None:
            return None in self.salts or prompt.salt in self.salts
        is_same = (self.prefix.salt, self.prefix.lora) == (prompt.salt, prompt.lora)
        return is_same and common_tokens(self.prefix, prompt) >= block


class ComparedEngine(Protocol):
    """The part of an engine that a comparison needs."""

    info: EngineInfo | None  # its declaration when it connected; None before that
    emptied: deque[float]  # when it lost its cache, in Unix time; the last times only
    flushed: deque[Flush]  # the last flushes that this kvpin ordered there


class Comparison:
    """Tells why caches missed, from the records of requests and the engines as they are now."""

    def __init__(
        self, records: RequestRecords, engines: Mapping[str, ComparedEngine], tokens_per_block: int
    ) -> None:
        """`tokens_per_block`: assumed of engines that do not tell theirs."""
        self._records = records
        self._engines = engines
        self._block = tokens_per_block

    async def with_answer(self, answer_id: str, record: RequestRecord) -> Diagnose | None:
        """Compares with the request that has this answer; None if its tenant has no such request."""
        other = self._records.answered(answer_id, record.tenant)
        if other is None or not _may_compare(record, other):
            return None
        like = await off_loop(lambda: self._likeness(record, other), ms=math.inf)  # many values take long
        return lambda reused: self._diagnose(record, other, like, reused)

    async def explain(self, record: RequestRecord) -> Diagnosis:
        """Why no more of a finished request's prompt was reused, compared with the nearest earlier one: the
        request of the same tenant that shares most of its prompt; of equals the newest of the same API. If
        that is less than a tenth: one whose text is alike and repeats a tenth behind a difference. If none
        shares a block: the one that it continues, or one whose text is alike, on whatever model."""
        if record.diagnosis is None:
            earlier = [
                other
                for other in self._records
                if other.started < record.started
                and record.prompt is not None
                and other.prompt is not None
                and other.error is None
                and _may_compare(record, other)
            ]
            # Only requests of one API can be compared by their fields. The last one is compared first.
            earlier.sort(key=lambda other: other.route == record.route)

            def nearest() -> tuple[RequestRecord | None, Compared | None]:
                other = self._most_like(record, earlier)
                return other, None if other is None else self._likeness(record, other)

            # It may decode the bodies of many.
            other, like = await off_loop(nearest, ms=math.inf if earlier else 0.0)
            record.diagnosis = self._diagnose(record, other, like, record.reported_tokens)
        return record.diagnosis

    def tokens_per_block(self, record: RequestRecord) -> int:
        """The block size of the engine that computed its prompt: only full blocks are reused."""
        engine = self._engines.get(record.computed_by or "")
        own = engine.info.tokens_per_block if engine is not None and engine.info is not None else None
        return own or self._block

    def _diagnose(
        self, record: RequestRecord, other: RequestRecord | None, like: Compared | None, reused: int | None
    ) -> Diagnosis:
        """Why no more of a prompt was reused. `other` is the request it is compared with, `reused` are the
        tokens that the engine reported; None: as predicted."""
        prompt, placement, own = record.prompt, record.placement, record.computed_by
        if prompt is None or placement is None or record.tokens_agree is False:
            return Diagnosis(n_tokens=None)
        predicted = placement.predicted_tokens
        holder = max(placement.costs, key=lambda cost: cost.cached_tokens)
        facts = Diagnosis(
            n_tokens=len(prompt.token_ids),
            is_whole=prompt.whole,
            reused_tokens=predicted if reused is None else reused,
            predicted_tokens=predicted if placement.firm else 0,
            cut_tokens=placement.cut_tokens,
            lacks=placement.lacks,
            holder=holder.computed_by,
            held_tokens=holder.cached_tokens if holder.computed_by != own else 0,
            tokens_per_block=self.tokens_per_block(record),
            rules=tuple(record.normalised),
        )
        if other is None or like is None:
            return facts
        # An engine that answers may have got the KV of the one that computed it.
        left_on = own if own in (other.computed_by, other.engine) else other.computed_by
        over = _end(other)
        until = _end(record) + _NOTICED_S * ((record.reported_tokens or 0) < predicted)
        engine = self._engines.get(left_on or "")
        flushed = [
            each.at
            for each in (engine.flushed if engine is not None else ())
            if over <= each.at <= _end(record) and each.concerns(prompt, facts.tokens_per_block)
        ]
        answered = over if other.answered_s is None else other.started + other.answered_s
        return replace(
            facts,
            compared=like,
            is_running=record.started < answered,
            left_on=left_on,
            is_candidate=left_on in {cost.computed_by for cost in placement.costs},
            is_emptied=engine is not None and any(over <= emptied <= until for emptied in engine.emptied),
            flushed_at=max(flushed, default=None),
        )

    # --- in a thread ----------------------------------------------------------------------------------

    def _most_like(self, record: RequestRecord, earlier: Sequence[RequestRecord]) -> RequestRecord | None:
        """The nearest of these requests."""
        best, most = None, 0
        for other in reversed(earlier):
            if record.prompt is None or other.prompt is None or _namespace(other) != _namespace(record):
                continue
            more = slice(most + 1)
            if other.prompt.token_ids[more] != record.prompt.token_ids[more]:
                continue  # it does not share more than the best
            shared = common_tokens(record.prompt, other.prompt)
            if shared > most:
                best, most = other, shared
        fields = self._records.fields(record)
        least, block = REPEATED * (record.n_tokens or 0), self.tokens_per_block(record)
        if most >= max(least, block) or fields is None:
            return best
        newest, continued = earlier[::-1], fields.get(CONTINUED)
        goes_on = [other for other in newest if continued is not None and other.answer_id == continued]
        looks = [(other, self._records.fields(other) or {}) for other in newest[:_LOOKS]]
        looks.sort(key=lambda look: look[1].get("tools") != fields.get("tools"))
        alike = (other for other, others in looks if are_alike(fields, others))
        if most < block:
            return next(chain(goes_on, alike), None)
        # More than it shares with any may stand behind a difference.
        near = (other for other in alike if _namespace(other) == _namespace(record))
        likeness = ((other, self._likeness(record, other)) for other in near)
        return next((other for other, like in likeness if like.repeated_tokens >= least), best)

    def _likeness(self, record: RequestRecord, other: RequestRecord) -> Compared:
        """How the prompts of two requests compare."""
        (model, lora), (other_model, other_lora) = _namespace(record), _namespace(other)
        is_same = (model, lora) == (other_model, other_lora)
        common = common_tokens(record.prompt, other.prompt) if is_same else 0
        has_fields, found, changes = self._difference(record, other)
        return Compared(
            request_id=other.request_id,
            n_tokens=other.n_tokens or 0,
            common_tokens=common,
            repeated_tokens=repeated_tokens(record.prompt, other.prompt, common),
            same_model=model == other_model,
            same_lora=lora == other_lora,
            has_fields=has_fields,
            difference=found,
            changes=changes,
        )

    def _difference(
        self, record: RequestRecord, other: RequestRecord
    ) -> tuple[bool, Difference | None, tuple[str, ...]]:
        """(the fields show every difference, the first difference, what of kvpin's alone made it). Each API
        has its own fields. A response's `input` holds only what follows the response that it continues."""
        fields, others = self._records.fields(record), self._records.fields(other)
        if fields is None or others is None or record.route != other.route:
            return False, None, ()
        continued = fields.get(CONTINUED)
        is_told = continued == others.get(CONTINUED) or continued == other.answer_id
        try:
            found = difference(fields, others)
            if found is None or not (is_told and (record.normalised or other.normalised)):
                return is_told, found, ()
            sent, others = (self._records.fields(each, as_sent=True) for each in (record, other))
            if sent is None or others is None or sent.get(CONTINUED) != others.get(CONTINUED):
                return is_told, found, ()
            cause = cause_as_sent(found, sent, others)
        except RecursionError:  # values that are nested hundreds of levels deep
            return False, None, ()
        if cause is not None:
            return is_told, cause, ()
        # What changed one of them alone is the cause. If there is none, any of them may be.
        one, two = record.normalised, other.normalised
        alone = [name for name in (*one, *two) if (name in one) != (name in two)]
        return is_told, found, tuple(alone or one)


def common_tokens(one: Prompt | None, other: Prompt | None) -> int:
    """Number of leading tokens of two prompts that are equal in id and extra id."""
    if one is None or other is None:
        return 0
    common = common_prefix(one.token_ids, other.token_ids)
    if one.extra_ids is None and other.extra_ids is None:
        return common
    text = array("Q", bytes(8 * common))
    return common_prefix((one.extra_ids or text)[:common], (other.extra_ids or text)[:common])


def repeated_tokens(one: Prompt | None, other: Prompt | None, common: int) -> int:
    """Number of tokens of a prompt, behind the first `common` ones, that the other prompt also has behind
    these; an estimate from samples."""
    if one is None or other is None:
        return 0
    ids, others = one.token_ids, other.token_ids[common:]
    starts = range(common, len(ids) - _SAMPLE_TOKENS + 1)
    sampled = starts[:: max(len(starts) // _SAMPLES, 1)]
    if not sampled:
        return 0
    raw, size = others.tobytes(), others.itemsize
    found = sum(_has(raw, ids[at : at + _SAMPLE_TOKENS].tobytes(), size) for at in sampled)
    return found * (len(ids) - common) // len(sampled)


def _has(raw: bytes, sample: bytes, size: int) -> bool:
    """True if items of `size` bytes contain the items of the sample."""
    at = -1
    for _ in range(_TRIES):
        at = raw.find(sample, at + 1)
        if at < 0 or at % size == 0:
            return at >= 0
    return False


def _may_compare(record: RequestRecord, other: RequestRecord) -> bool:
    """True if the tenant may learn of the other request: the tenant sent it, under the same salt."""
    own, others = (each.prompt.salt if each.prompt is not None else None for each in (record, other))
    return other.tenant == record.tenant and own == others


def _namespace(record: RequestRecord) -> tuple[str | None, str | None]:
    """The model and the LoRA adapter that it ran on."""
    return record.served_as or record.model, record.prompt.lora if record.prompt is not None else None


def _end(record: RequestRecord) -> float:
    """When a request was over, in Unix time."""
    return record.started + (record.duration_s or 0.0)
