"""The engine: one thread that steps a model over the requests in flight.

A step: plan → compute → record → publish → deliver. Between steps the thread runs the commands of other
threads: submit and cancel requests, operations on the cache.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import torch
from msgspec.structs import replace
from torch import Tensor

from engine_adapter.errors import EngineSpecError, EngineUnavailable
from engine_adapter.memory import available_bytes
from engine_adapter.torch_engine.attention import KvStorage
from engine_adapter.torch_engine.kv_cache import KvCache
from engine_adapter.torch_engine.kv_tree import CopyFailed, KvTree
from engine_adapter.torch_engine.model import LoadedModel, Runner, first_line
from engine_adapter.torch_engine.requests import (
    Finished,
    FinishReason,
    GenerationRequest,
    NoScores,
    OnOutput,
    Output,
    PromptScores,
    RequestRefused,
    Scheduled,
    Token,
)
from engine_adapter.torch_engine.sampling import Sampler, choose_all, logprobs_of
from engine_adapter.torch_engine.scheduler import Active, Scheduler, check_request
from engine_adapter.torch_engine.serve import EmbeddedOptions
from engine_adapter.types import KvEvent

T = TypeVar("T")

MAX_FAILED_STEPS = 5
"""After this many steps in a row in which every request failed, the engine counts as broken and ends."""
_log = logging.getLogger("kvpin.engine")


@dataclass(slots=True)
class Counters:
    """Running totals for metrics. Only the engine thread writes them; any thread reads them."""

    steps: int = 0
    prompt_tokens: int = 0  # of all scheduled prompts
    cached_tokens: int = 0  # of these, from cache
    generated_tokens: int = 0
    preemptions: int = 0
    running: int = 0
    waiting: int = 0
    finished: dict[str, int] = field(default_factory=dict)


class EngineCore:
    """Runs `model`. `publish` gets the KV events of each step before the step's tokens are delivered."""

    def __init__(
        self, model: LoadedModel, options: EmbeddedOptions, publish: Callable[[list[KvEvent]], None]
    ) -> None:
        """Allocates the KV pool. Raises EngineSpecError when model and options do not fit together."""
        self.counters = Counters()  # running totals. (Blocks evicted, offloaded, restored: `KvCache.stats`.)
        # block_bytes, gpu_blocks, host_blocks: sizes of the KV tiers.
        self.block_bytes = model.block_bytes(options.tokens_per_block)
        self.gpu_blocks = options.gpu_blocks(
            self.block_bytes,
            context=model.max_model_len,
            available=available_bytes() if model.device == "cpu" else None,
        )
        self.host_blocks = options.host_cache_bytes // self.block_bytes
        # Most tokens of prompt and output together; the model and the cache limit it.
        self.max_model_len = min(model.max_model_len, self.gpu_blocks * options.tokens_per_block)
        _log.info(
            "KV cache: %d blocks of %d tokens, %.1f MiB; requests of up to %d tokens; "
            "%d prompt tokens per step, half as many while others decode",
            self.gpu_blocks,
            options.tokens_per_block,
            self.gpu_blocks * self.block_bytes / 2**20,
            self.max_model_len,
            options.prefill_chunk,
        )
        self._model = model
        try:
            storage = KvStorage(
                model.layers,
                gpu_blocks=self.gpu_blocks,
                host_blocks=self.host_blocks,
                tokens_per_block=options.tokens_per_block,
                device=torch.device(model.device),
                dtype=model.module.dtype,
            )
        except (RuntimeError, MemoryError, OSError, OverflowError) as error:
            raise EngineSpecError(
                f"cannot allocate {self.gpu_blocks} + {self.host_blocks} KV blocks of "
                f"{self.block_bytes} bytes: {first_line(error)}"
            ) from error
        tree = KvTree(
            gpu_blocks=self.gpu_blocks,
            host_blocks=self.host_blocks,
            tokens_per_block=options.tokens_per_block,
            copier=storage,
        )
        self._cache = KvCache(tree, block_bytes=self.block_bytes, pin_share=options.pin_share)
        self._scheduler = Scheduler(
            self._cache, max_num_seqs=options.max_num_seqs, prefill_chunk=options.prefill_chunk
        )
        self._runner = Runner(model, storage, options.tokens_per_block)
        self._publish = publish
        self._seeds = random.Random(options.seed)  # noqa: S311 - sampling, not secrecy
        self._wake = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._in_flight: dict[str, Active] = {}
        self._calls: set[Future[Any]] = set()
        self._open = False
        self._thread = threading.Thread(target=self._supervise, name="kvpin-engine", daemon=True)
        self._failed_steps = 0
        self._failure: str | None = None

    # --- from any thread -------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """True from `start` until `stop`, or until the engine dies."""
        return self._open

    def start(self) -> None:
        """Starts the thread. An engine runs once."""
        with self._wake:
            self._thread.start()
            self._open = True

    def stop(self) -> None:
        """Ends the thread after its step. Requests in flight finish as `cancelled`. Blocks until done."""
        with self._wake:
            self._open = False
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    def wait(self) -> str | None:
        """Blocks until the started engine has ended; returns why it died, None after `stop`."""
        self._thread.join()
        return self._failure

    def submit(self, request: GenerationRequest, on_output: OnOutput) -> None:
        """Queues a request; thread-safe. Raises RequestRefused if it can never run, and EngineUnavailable if
        the engine is not running."""
        check_request(request, self._model.vocab_size, self.max_model_len)
        model, params = self._model, request.sampling
        ends = params.ends(model.eos_token_ids)
        sampler = Sampler(request, ends=ends, vocab_size=model.vocab_size, seed=self._seeds.getrandbits(63))
        room = self.max_model_len - len(request.token_ids)
        limit = room if params.max_tokens is None else min(params.max_tokens, room)
        active = Active(request, on_output, sampler, ends=ends, limit=limit)
        with self._wake:
            self._post(partial(self._scheduler.add, active))
            self._in_flight[request.request_id] = active

    def cancel(self, request_id: str) -> None:
        """Ends a request before the next step and frees its blocks; thread-safe. The request finishes as
        `cancelled`. An unknown id is ignored."""
        with self._wake:
            if self._open:
                self._post(partial(self._cancel, request_id))

    def call(self, fn: Callable[[KvCache], T]) -> Future[T]:
        """Runs `fn` between two steps in the engine thread; thread-safe. Its events are published before the
        future is done. Raises EngineUnavailable when the engine is not running."""
        future: Future[T] = Future()
        with self._wake:
            self._post(partial(self._run_call, fn, future))
            self._calls.add(future)
        return future

    def _post(self, command: Callable[[], None]) -> None:
        """Queues a command for the engine thread. The caller holds `_wake`."""
        if not self._open:
            raise EngineUnavailable("the engine is not running")
        self._inbox.append(command)
        self._wake.notify()

    # --- in the engine thread: commands ----------------------------------------------------------

    def _supervise(self) -> None:
        """The thread's main function. However it ends, every request and call gets an answer."""
        message = None
        try:
            self._loop()
        except Exception as error:  # noqa: BLE001 - supervises this thread
            _log.exception("the engine died: all its requests end")
            self._failure = _describe(error)
            message = f"the engine died: {self._failure}"
        finally:
            with self._wake:
                self._open = False
            for active in list(self._in_flight.values()):
                self._finish(active, "cancelled", message)
            for future in self._calls:
                if future.set_running_or_notify_cancel():
                    future.set_exception(EngineUnavailable(message or "the engine was stopped"))
            self._calls.clear()

    def _loop(self) -> None:
        while True:
            with self._wake:
                while self._open and not self._inbox and not self._scheduler.busy:
                    self._wake.wait()
                if not self._open:
                    return
                commands, self._inbox = self._inbox, []
            for command in commands:
                command()
            if self._scheduler.busy:
                self._step()
            self.counters.running = len(self._scheduler.running)
            self.counters.waiting = len(self._scheduler.waiting)

    def _cancel(self, request_id: str) -> None:
        if (active := self._in_flight.get(request_id)) is not None:
            self._finish(active, "cancelled")

    def _run_call(self, fn: Callable[[KvCache], T], future: Future[T]) -> None:
        self._calls.discard(future)
        if not future.set_running_or_notify_cancel():
            return
        self._cache.expire(time.monotonic())
        try:
            result = fn(self._cache)
        except Exception as error:
            self._publish_events()
            future.set_exception(error)
            if is_fatal(error):
                raise
        else:
            self._publish_events()
            future.set_result(result)

    # --- in the engine thread: steps -------------------------------------------------------------

    def _step(self) -> None:
        self._cache.expire(time.monotonic())
        planned = self._plan()
        outputs: list[tuple[Active, list[Output]]] = []
        if planned:
            self._announce_scheduled(planned)
            outputs = self._record(planned, self._compute(planned))
        self._publish_events()
        for active, tokens in outputs:
            self._deliver(active, tokens)
        self.counters.steps += 1
        self.counters.preemptions = self._scheduler.preemptions

    def _plan(self) -> list[Active]:
        """The requests of this step. One whose KV cannot be copied ends; any other error ends the engine, as
        nobody knows what the cache holds after it."""
        try:
            planned = self._scheduler.plan()
        except CopyFailed as error:
            if self._scheduler.planning is None:
                raise
            self._fail(self._scheduler.planning, error)
            self._count_failed_step(error)
            return []
        if not planned:  # the cache has no room for the first waiting request although nothing else runs
            pinned = self._cache.pinned_blocks
            message = f"the KV cache has no room for this request beside {pinned} pinned blocks"
            self._finish(self._scheduler.waiting[0], "cancelled", message)
        return planned

    def _compute(self, planned: list[Active]) -> list[Outcome]:
        try:
            return compute(self._runner, planned)
        except Exception as error:
            # One of these requests broke the device. Each gets a final error, so that it cannot break another
            # engine in a retry.
            for active in planned:
                self._finish(active, "error", _describe(error))
            raise

    def _fail(self, active: Active, error: Exception) -> None:
        _log.error("a request failed and ends; the others go on", exc_info=error)
        self._finish(active, "error", _describe(error))

    def _count_failed_step(self, error: Exception) -> None:
        self._failed_steps += 1
        if is_fatal(error):
            raise error
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise EngineUnavailable(
                f"{MAX_FAILED_STEPS} steps in a row failed, the last with {_describe(error)}"
            ) from error

    def _record(self, planned: list[Active], outcomes: list[Outcome]) -> list[tuple[Active, list[Output]]]:
        """Enters the outcomes into the cache and the requests; returns the outputs to deliver. Ends the
        requests that failed. Raises when the engine is to end, see `MAX_FAILED_STEPS`."""
        outputs: list[tuple[Active, list[Output]]] = []
        failure: Exception | None = None
        for active, outcome in zip(planned, outcomes, strict=True):
            if isinstance(outcome, RequestRefused):
                self._finish(active, "refused", str(outcome), outcome.param)
            elif isinstance(outcome, Exception):
                failure = outcome
                self._fail(active, outcome)
            else:
                self._cache.advance(active.sequence, active.sequence.count)
                if outcome is not None:
                    outputs.append((active, self._accept(active, outcome)))
        if failure is not None and all(isinstance(outcome, Exception) for outcome in outcomes):
            self._count_failed_step(failure)
        else:
            self._failed_steps = 0
        return outputs

    def _accept(self, active: Active, token: Token) -> list[Output]:
        """Adds a token to its request; returns what to deliver."""
        made: list[Output] = []
        if active.scores is not None:
            made.append(PromptScores(active.scores))
            active.scores = None
        made.append(token)
        self.counters.generated_tokens += 1
        reason = active.accept(token.token_id)
        if reason is not None:
            self._forget(active, reason)
            made.append(Finished(reason))
        return made

    def _announce_scheduled(self, planned: list[Active]) -> None:
        for active in planned:
            if not active.scheduled:
                active.scheduled = True
                cached = len(active.sequence.path) * self._cache.tokens_per_block
                self.counters.prompt_tokens += len(active.request.token_ids)
                self.counters.cached_tokens += cached
                self._deliver(active, [Scheduled(cached)])

    def _finish(
        self, active: Active, reason: FinishReason, message: str | None = None, param: str | None = None
    ) -> None:
        self._forget(active, reason)
        self._deliver(active, [Finished(reason, message, param)])

    def _forget(self, active: Active, reason: FinishReason) -> None:
        self._scheduler.remove(active)
        self._in_flight.pop(active.request.request_id, None)
        self.counters.finished[reason] = self.counters.finished.get(reason, 0) + 1

    def _deliver(self, active: Active, outputs: list[Output]) -> None:
        """Hands outputs to the request's owner. If the owner's callback fails, only that request ends."""
        try:
            active.on_output(outputs)
        except Exception:  # noqa: BLE001 - another's callback must not end the engine
            _log.exception("the callback of a request failed; that request ends")
            if active.request.request_id in self._in_flight:
                with self._wake:
                    self._inbox.append(partial(self._cancel, active.request.request_id))

    def _publish_events(self) -> None:
        if events := self._cache.tree.journal.drain():
            self._publish(events)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


# --- the computation of one step: a request that fails costs no other request its answer -----------------

Outcome = Token | Exception | None
"""The outcome for one request: its next token, an error, or None while its prompt is not complete."""

_DEVICE_ERRORS = ("CUDA error", "CUDA driver error", "cuDNN error", "CUBLAS_STATUS_", "HIP error")
_ROWS = 32  # of the vocabulary's size, in float32, that are scored at a time


def is_fatal(error: Exception) -> bool:
    """True for an error of the device. It stays broken for as long as the process lives, with its KV."""
    if isinstance(error, torch.AcceleratorError):
        return True
    if isinstance(error.__cause__, Exception) and is_fatal(error.__cause__):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _DEVICE_ERRORS)


def compute(runner: Runner, planned: Sequence[Active]) -> list[Outcome]:
    """The outcome of each request, in order. Keeps the logprobs of prompts in `Active.scores`.

    When a step fails, its requests run one by one: only those that fail alone have failed. That repeats no
    choice: tokens are chosen after the step has run. KV that was written already is written again. Raises an
    error of the device, see `is_fatal`: nothing can run on it any more.
    """
    try:
        return _run(runner, planned)
    except Exception as error:
        if is_fatal(error):
            raise
        if len(planned) == 1:
            return [_judged(error, planned[0], None)]
        _log.warning("a step of %d requests failed (%r): running them one by one", len(planned), error)
    return [outcome for active in planned for outcome in compute(runner, [active])]


@torch.inference_mode()
def _run(runner: Runner, planned: Sequence[Active]) -> list[Outcome]:
    sequences = [active.sequence for active in planned]
    wants_hidden = any(active.completes and active.request.wants_hidden for active in planned)
    logits, hidden = runner.run_with_hidden(sequences) if wants_hidden else (runner.run(sequences), None)
    ends = list(accumulate(sequence.logits for sequence in sequences))
    for active, end in zip(planned, ends, strict=True):
        if active.scores is not None and active.sequence.logits:
            active.scores += _scores(logits[end - active.sequence.logits : end], active)
    complete = [(active, end - 1) for active, end in zip(planned, ends, strict=True) if active.completes]
    rows = [row for _, row in complete]
    chosen = choose_all(
        logits if len(rows) == len(logits) else logits[rows], [active.sampler for active, _ in complete]
    )
    made = iter(
        _judged(choice, active, None if hidden is None else hidden[row])
        for choice, (active, row) in zip(chosen, complete, strict=True)
    )
    return [next(made) if active.completes else None for active in planned]


def _judged(choice: Token | Exception, active: Active, hidden: Tensor | None) -> Token | Exception:
    """The outcome of a choice. Embeddings of a client's are the cause of scores that are no numbers. Raises
    errors of the device."""
    if isinstance(choice, NoScores) and active.request.embeddings:
        return RequestRefused("the prompt's embeddings lead to scores that are no numbers", param="prompt")
    if isinstance(choice, Exception) and is_fatal(choice):
        raise choice
    if isinstance(choice, Exception) or hidden is None or not active.request.wants_hidden:
        return choice
    return replace(choice, hidden=hidden.float().cpu().numpy().tobytes())


def _scores(rows: Tensor, active: Active) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
    """Logprobs of the prompt tokens after each that the step computes, but for those that are known. `rows`
    are the logits after these."""
    begin, known = active.sequence.computed, len(active.scores or ())
    first = max(known, begin)
    targets = active.request.token_ids[first + 1 : begin + active.sequence.count + 1]
    best = active.request.sampling.prompt_logprobs or 0
    rows, found = rows[first - begin : first - begin + len(targets)], []
    for at in range(0, len(targets), _ROWS):
        tokens = torch.tensor(targets[at : at + _ROWS], device=rows.device, dtype=torch.long)
        found += logprobs_of(rows[at : at + _ROWS], tokens, best)
    return found
