"""Chooses the tokens of the next step.

A step runs one token of every decoding request and up to `prefill_chunk` prompt tokens. It runs half as many
if requests decode, as these wait for it. Requests start by lowest priority value, then in order of arrival.
When blocks run out, the running request with the highest priority value (the youngest of them) gives its
blocks back to the cache and waits again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from engine_adapter.torch_engine.kv_cache import KvCache, KvSequence
from engine_adapter.torch_engine.kv_tree import Node
from engine_adapter.torch_engine.requests import FinishReason, GenerationRequest, OnOutput, RequestRefused
from engine_adapter.torch_engine.sampling import Sampler

SCORED_TOKENS = 128
"""Most tokens per step of a prompt whose logprobs are wanted: each has a row of the vocabulary's size."""


@dataclass(eq=False, slots=True)
class Active:
    """A request in flight."""

    request: GenerationRequest
    on_output: OnOutput
    sampler: Sampler
    ends: frozenset[int]  # tokens that stop it
    limit: int  # most tokens to generate
    sequence: KvSequence = field(init=False)  # its tokens and blocks
    # Logprobs of its prompt's tokens from the second on, as far as they are computed; None if they are not
    # wanted, or were delivered.
    scores: list[tuple[float, tuple[tuple[int, float], ...]]] | None = field(init=False)
    generated: int = field(default=0, init=False)
    scheduled: bool = field(default=False, init=False)  # it has run before

    def __post_init__(self) -> None:
        request, reuses = self.request, self.request.sampling.prompt_logprobs is None
        where = request.token_ids, request.extra_ids, request.cache_salt, request.retention
        self.sequence = KvSequence(*where, reuses=reuses, embeddings=request.embeddings)
        self.scores = None if reuses else []

    @property
    def uncomputed(self) -> int:
        """Tokens whose KV is not computed yet."""
        return len(self.sequence.tokens) - self.sequence.computed

    @property
    def wants_scores(self) -> bool:
        """True if logprobs of its prompt are still to be computed."""
        return self.scores is not None and len(self.scores) + 1 < len(self.request.token_ids)

    @property
    def completes(self) -> bool:
        """True when all its tokens are computed after the next step, so that another can be chosen."""
        return self.sequence.count == self.uncomputed

    def plan(self, count: int) -> None:
        """Lets the next step compute `count` tokens."""
        self.sequence.count = count
        self.sequence.logits = count if self.wants_scores else int(self.completes)

    def accept(self, token_id: int) -> FinishReason | None:
        """Adds a generated token; returns why the request ends, None if it goes on."""
        self.sequence.append(token_id)
        self.generated += 1
        if token_id in self.ends:
            return "stop"
        return "length" if self.generated >= self.limit else None


class Scheduler:
    """The requests in flight."""

    def __init__(self, cache: KvCache, *, max_num_seqs: int, prefill_chunk: int) -> None:
        self.waiting: list[Active] = []  # in the order in which they will run
        self.running: list[Active] = []
        self.preemptions = 0
        # The request `plan` works on; if `plan` raises, that request is at fault.
        self.planning: Active | None = None
        self._cache = cache
        self._max_num_seqs = max_num_seqs
        self._prefill_chunk = prefill_chunk

    @property
    def busy(self) -> bool:
        """True when a request runs or waits."""
        return bool(self.running or self.waiting)

    def add(self, active: Active) -> None:
        """Queues a request."""
        self.waiting.insert(bisect_right(self.waiting, active.request.priority, key=_priority), active)

    def remove(self, active: Active) -> None:
        """Forgets a request and frees its blocks; an unknown one is ignored."""
        self._cache.end(active.sequence)
        if active in self.running:
            self.running.remove(active)
        elif active in self.waiting:
            self.waiting.remove(active)

    def plan(self) -> list[Active]:
        """Reserves blocks for the next step; returns the requests that it runs: those with a single token
        first, by the length of their sequences, so that similar lengths attend together. Empty although
        `busy` when the cache has no room for the first waiting request and nothing else runs."""
        self.planning = None
        planned = self._reserve_decodes()
        for active in planned:
            active.plan(1)
        budget = max(1, self._prefill_chunk // 2) if planned else self._prefill_chunk
        claimed: set[tuple[Node, bytes]] = set()
        for active in self._prompts():
            if count := self._chunk(active, budget, claimed):
                active.plan(count)
                planned.append(active)
                budget -= count
            if not count or not budget:
                break
        planned.sort(
            key=lambda active: (
                active.sequence.count > 1,
                active.sequence.count == 1 and active.sequence.computed,
            )
        )
        return planned

    def _reserve_decodes(self) -> list[Active]:
        """Reserves room for one more token of each decoding request; returns those that got it."""
        for active in list(self.running):
            if active.uncomputed != 1 or active not in self.running:
                continue
            self.planning = active
            while not self._cache.reserve(active.sequence, len(active.sequence.tokens)):
                if self._preempt() is active:
                    break
        return [active for active in self.running if active.uncomputed == 1]

    def _preempt(self) -> Active:
        """Stops the youngest running request with the highest priority value; it waits before its equals."""
        victim = max(reversed(self.running), key=_priority)
        self.running.remove(victim)
        self._cache.end(victim.sequence)
        self.waiting.insert(bisect_left(self.waiting, victim.request.priority, key=_priority), victim)
        self.preemptions += 1
        return victim

    def _prompts(self) -> Iterator[Active]:
        """Requests with a prompt to compute, running ones first. Admits a waiting one when asked for it."""
        yield from [active for active in self.running if active.uncomputed > 1]
        while self.waiting and len(self.running) < self._max_num_seqs:
            self.planning = self.waiting[0]
            if not self._cache.begin(self.waiting[0].sequence, spare=len(self.running)):
                break
            self.running.append(self.waiting.pop(0))
            yield self.running[-1]

    def _chunk(self, active: Active, budget: int, claimed: set[tuple[Node, bytes]]) -> int:
        """Number of prompt tokens to compute now; 0 if this step computes its next block for another request:
        the next step shares it."""
        self.planning = active
        sequence = active.sequence
        self._cache.extend(sequence)
        block = sequence.tip, self._cache.key_of(sequence, len(sequence.path))
        if block in claimed:
            return 0
        count = min(budget, active.uncomputed)
        if active.wants_scores:
            count = min(count, SCORED_TOKENS)
        if sequence.computed % self._cache.tokens_per_block + count >= self._cache.tokens_per_block:
            claimed.add(block)
        return count


def _priority(active: Active) -> int:
    return active.request.priority


def check_request(request: GenerationRequest, vocab_size: int, max_model_len: int) -> None:
    """Raises RequestRefused for a request that can never run, or could break the device; names the field."""
    tokens = np.array(request.token_ids, dtype=np.int64)
    if not 0 < len(tokens) < max_model_len:
        fault = f"the prompt has {len(tokens)} tokens; with one to generate, 1 to {max_model_len - 1} fit"
        raise RequestRefused(fault, param="prompt")
    sampling = request.sampling
    check_token_ids("stop_token_ids", enumerate(sampling.stop_token_ids), vocab_size)
    check_token_ids("logit_bias", ((token, token) for token, _ in sampling.logit_bias), vocab_size)
    no_text = np.flatnonzero((tokens < 0) | (tokens >= vocab_size)).tolist()
    if no_text and sampling.prompt_logprobs is not None:
        raise RequestRefused("embeddings in a prompt have no logprobs", param="logprobs")
    for index in no_text:
        extra_id = request.extra_ids[index] if request.extra_ids is not None else 0
        rows = request.embeddings.get(extra_id)
        if rows is None or not 0 <= tokens[index] - vocab_size < len(rows):
            param = f"prompt[{index}]"
            fault = f"{param} is {tokens[index]}: no text, and no row that extra id {extra_id} has"
            raise RequestRefused(fault, param=param)


def check_token_ids(name: str, placed: Iterable[tuple[int, int]], vocab_size: int) -> None:
    """Raises RequestRefused for a token id outside the vocabulary. Each comes with its place in the field."""
    for place, token in placed:
        if not 0 <= token < vocab_size:
            param = f"{name}[{place}]"
            raise RequestRefused(f"{param} is {token}, outside the vocabulary of {vocab_size}", param=param)
