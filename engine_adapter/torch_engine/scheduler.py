"""Chooses the tokens of the next step, and computes the step."""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from engine_adapter.torch_engine.kv_cache import KvCache, KvSequence
from engine_adapter.torch_engine.kv_node import Node
from engine_adapter.torch_engine.requests import (
    FinishReason,
    GenerationRequest,
    NoScores,
    OnOutput,
    RequestRefused,
    SamplingParams,
    Token,
)
from engine_adapter.torch_engine.runner import LoadedModel, Runner, ScheduledTokens
from engine_adapter.torch_engine.sampling import Sampler, choose_all, logprobs_of

# --- chooses the tokens of the next step ----------------------------------------------------------------
# A step runs one token of every decoding request and up to `prefill_chunk` prompt tokens. It runs half as
# many if requests decode, as these wait for it. Requests start by lowest priority value, then in order of
# arrival. When blocks run out, the running request with the highest priority value (the youngest of them)
# gives its blocks back to the cache and waits again.

SCORED_TOKENS = 128
"""Most tokens per step of a prompt whose logprobs are wanted: each has a row of the vocabulary's size."""


@dataclass(eq=False, slots=True)
class Active:
    """A request in flight.

    Attributes:
        sequence: its tokens and blocks.
        ends: tokens that stop it. limit: most tokens to generate.
        scores: logprobs of its prompt's tokens from the second on, as far as they are computed; None if
            they are not wanted, or were delivered.
    """

    request: GenerationRequest
    on_output: OnOutput
    sampler: Sampler
    ends: frozenset[int]
    limit: int
    sequence: KvSequence = field(init=False)
    scores: list[tuple[float, tuple[tuple[int, float], ...]]] | None = field(init=False)
    generated: int = field(default=0, init=False)
    scheduled: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        request, reuses = self.request, self.request.sampling.prompt_logprobs is None
        self.sequence = KvSequence(
            request.token_ids, request.extra_ids, request.cache_salt, request.retention, reuses=reuses
        )
        self.scores = None if reuses else []

    @property
    def uncomputed(self) -> int:
        """Tokens whose KV is not computed yet."""
        return len(self.sequence.tokens) - self.sequence.computed

    @property
    def wants_scores(self) -> bool:
        """True if logprobs of its prompt are still to be computed."""
        return self.scores is not None and len(self.scores) + 1 < len(self.request.token_ids)

    def accept(self, token_id: int) -> FinishReason | None:
        """Adds a generated token; returns why the request ends, None if it goes on."""
        self.sequence.append(token_id)
        self.generated += 1
        if token_id in self.ends:
            return "stop"
        return "length" if self.generated >= self.limit else None


@dataclass(frozen=True, slots=True)
class Item:
    """The next `count` tokens of a request; `first` if it has never run."""

    active: Active
    count: int
    first: bool

    @property
    def completes(self) -> bool:
        """True when all its tokens are computed after this step, so that the next one can be chosen."""
        return self.count == self.active.uncomputed

    @property
    def wants_hidden(self) -> bool:
        """True if its next token comes with the hidden state that it is chosen from."""
        return self.completes and self.active.request.wants_hidden

    @property
    def logits(self) -> int:
        """After how many of its last tokens logits are needed."""
        return self.count if self.active.wants_scores else int(self.completes)


class Scheduler:
    """The requests in flight.

    Attributes:
        waiting: in the order in which they will run.
        planning: the request `plan` works on; if `plan` raises, that request is at fault.
    """

    def __init__(self, cache: KvCache, *, max_num_seqs: int, prefill_chunk: int) -> None:
        self.waiting: list[Active] = []
        self.running: list[Active] = []
        self.preemptions = 0
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

    def plan(self) -> list[Item]:
        """Reserves blocks for the next step and returns its items: single tokens first, by the length of
        their sequences, so that similar lengths attend together.

        Empty although `busy` when the cache has no room for the first waiting request and nothing else runs.
        """
        self.planning = None
        items = [Item(active, 1, first=not active.scheduled) for active in self._reserve_decodes()]
        budget = max(1, self._prefill_chunk // 2) if items else self._prefill_chunk
        claimed: set[tuple[Node, bytes]] = set()
        for active in self._prompts():
            count = self._chunk(active, budget, claimed)
            if count:
                items.append(Item(active, count, first=not active.scheduled))
                budget -= count
            if not count or not budget:
                break
        for item in items:
            item.active.scheduled = True
        items.sort(key=lambda item: (item.count > 1, item.active.sequence.computed if item.count == 1 else 0))
        return items

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


def check_request(request: GenerationRequest, model: LoadedModel, max_model_len: int) -> None:
    """Raises RequestRefused for a request that can never run; it names the field."""
    tokens = np.array(request.token_ids, dtype=np.int64)
    if not len(tokens):
        raise RequestRefused("the prompt is empty", param="prompt")
    if len(tokens) >= max_model_len:
        raise RequestRefused(
            f"the prompt has {len(tokens)} tokens; with one to generate, at most {max_model_len} fit",
            param="prompt",
        )
    if request.sampling.max_tokens is not None and request.sampling.max_tokens < 1:
        raise RequestRefused("max_tokens is below 1", param="max_tokens")
    if tokens.min() < 0:
        raise RequestRefused(f"prompt[{tokens.argmin()}] is negative", param="prompt")
    if request.extra_ids is not None and len(request.extra_ids) != len(tokens):
        raise RequestRefused(
            f"extra_ids has {len(request.extra_ids)} entries for {len(tokens)} prompt tokens",
            param="extra_ids",
        )
    _check_stop_tokens(request.sampling, model)
    for token, _ in request.sampling.logit_bias:
        check_token_id(token, f"logit_bias[{token}]", model.vocab_size)
    _check_embeddings(request, model)
    fake = np.flatnonzero(tokens >= model.vocab_size)
    if len(fake) and request.sampling.prompt_logprobs is not None:
        raise RequestRefused("embeddings in a prompt have no logprobs", param="logprobs")
    for index in fake.tolist():
        _check_row(request, index, int(tokens[index]) - model.vocab_size)


def _check_stop_tokens(sampling: SamplingParams, model: LoadedModel) -> None:
    for index, token in enumerate(sampling.stop_token_ids):
        check_token_id(token, f"stop_token_ids[{index}]", model.vocab_size)
    if sampling.min_tokens and len(set(sampling.stop_token_ids)) == model.vocab_size:
        raise RequestRefused(
            "stop_token_ids name the whole vocabulary, and min_tokens forbids stop tokens: no token is left",
            param="stop_token_ids",
        )


def check_token_id(token: int, param: str, vocab_size: int) -> None:
    """Raises RequestRefused for a token id outside the vocabulary."""
    if not 0 <= token < vocab_size:
        raise RequestRefused(f"{param} is {token}, outside the vocabulary of {vocab_size}", param=param)


def _check_embeddings(request: GenerationRequest, model: LoadedModel) -> None:
    for extra_id, rows in request.embeddings.items():
        if rows.ndim != 2 or rows.shape[1] != model.hidden_size:  # noqa: PLR2004 - [rows, hidden]
            raise RequestRefused(
                f"embeddings of extra id {extra_id} have shape {list(rows.shape)}; "
                f"[rows, {model.hidden_size}] is needed",
                param="prompt",
            )


def _check_row(request: GenerationRequest, index: int, row: int) -> None:
    extra_id = request.extra_ids[index] if request.extra_ids is not None else 0
    rows = request.embeddings.get(extra_id)
    if rows is None or row >= rows.shape[0]:
        raise RequestRefused(
            f"prompt[{index}] is a fake id for row {row}, which extra id {extra_id} does not have",
            param=f"prompt[{index}]",
        )


# --- the computation of one step: a request that fails costs no other request its answer ----------------

Outcome = Token | Exception | None
"""The outcome of one item: the next token, an error, or None while its prompt is not complete."""

_log = logging.getLogger("kvpin.engine")
_DEVICE_ERRORS = ("CUDA error", "CUDA driver error", "cuDNN error", "CUBLAS_STATUS_", "HIP error")
_ROWS = 32  # of the vocabulary's size, in float32, that are scored at a time


def is_fatal(error: Exception) -> bool:
    """True for an error of the device. It stays broken for as long as the process lives, with its KV."""
    if isinstance(error, torch.AcceleratorError):
        return True
    if isinstance(error.__cause__, Exception) and is_fatal(error.__cause__):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _DEVICE_ERRORS)


def first_line(error: BaseException) -> str:
    """What an error says, in one line: torch adds advice on debugging to errors of the device."""
    return str(error).partition("\n")[0]


def compute(runner: Runner, items: Sequence[Item]) -> list[Outcome]:
    """The outcome of each item, in order. Keeps the logprobs of prompts that want them in `Active.scores`.

    When a step fails, its items run one by one: only those that fail alone have failed. That repeats no
    choice: tokens are chosen after the step has run. KV that was written already is written again.

    Raises:
        Exception: the device is broken, see `is_fatal`; nothing can run on it any more.
    """
    try:
        return _run(runner, items)
    except Exception as error:
        if is_fatal(error):
            raise
        if len(items) == 1:
            return [_judged(error, items[0], None)]
        _log.warning("a step of %d requests failed (%r): running them one by one", len(items), error)
    return [outcome for item in items for outcome in compute(runner, [item])]


@torch.inference_mode()
def _run(runner: Runner, items: Sequence[Item]) -> list[Outcome]:
    work = [
        ScheduledTokens(item.active.sequence, item.count, item.logits, item.active.request.embeddings)
        for item in items
    ]
    wants_hidden = any(item.wants_hidden for item in items)
    logits, hidden = runner.run_with_hidden(work) if wants_hidden else (runner.run(work), None)
    ends = list(accumulate(item.logits for item in items))
    for item, end in zip(items, ends, strict=True):
        if item.active.scores is not None and item.logits:
            item.active.scores += _scores(logits[end - item.logits : end], item)
    complete = [(item, end - 1) for item, end in zip(items, ends, strict=True) if item.completes]
    rows = [row for _, row in complete]
    chosen = choose_all(
        logits if len(rows) == len(logits) else logits[rows], [item.active.sampler for item, _ in complete]
    )
    made = iter(
        _judged(choice, item, None if hidden is None else hidden[row])
        for choice, (item, row) in zip(chosen, complete, strict=True)
    )
    return [next(made) if item.completes else None for item in items]


def _judged(choice: Token | Exception, item: Item, hidden: Tensor | None) -> Token | Exception:
    """The outcome of a choice. Embeddings of a client's are the cause of scores that are no numbers. Raises
    errors of the device."""
    if isinstance(choice, NoScores) and item.active.request.embeddings:
        return RequestRefused("the prompt's embeddings lead to scores that are no numbers", param="prompt")
    if isinstance(choice, Exception):
        if is_fatal(choice):
            raise choice
        return choice
    if hidden is None or not item.wants_hidden:
        return choice
    return replace(choice, hidden=hidden.float().cpu().numpy().tobytes())


def _scores(rows: Tensor, item: Item) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
    """Logprobs of the prompt tokens after each of the item's, but for those that are known. `rows` are the
    logits after the item's tokens."""
    active = item.active
    begin, known = active.sequence.computed, len(active.scores or ())
    first = max(known, begin)
    targets = active.request.token_ids[first + 1 : begin + item.count + 1]
    best = active.request.sampling.prompt_logprobs or 0
    return [
        score
        for at in range(0, len(targets), _ROWS)
        for score in logprobs_of(
            rows[first - begin + at : first - begin + len(targets)][:_ROWS],
            torch.tensor(targets[at : at + _ROWS], device=rows.device, dtype=torch.long),
            best,
        )
    ]
