"""The engine: one thread that steps a model over the requests in flight.

A step: plan → compute → record → publish → deliver. Between steps the thread runs the commands of other
threads: submit and cancel requests, operations on the cache.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from engine_adapter.errors import EngineSpecError, EngineUnavailable
from engine_adapter.memory import available_bytes
from engine_adapter.torch_engine.attention import KvStorage
from engine_adapter.torch_engine.kv_cache import KvCache
from engine_adapter.torch_engine.kv_tree import CopyFailed
from engine_adapter.torch_engine.requests import (
    Finished,
    FinishReason,
    GenerationRequest,
    OnOutput,
    Output,
    PromptScores,
    RequestRefused,
    Scheduled,
    Token,
)
from engine_adapter.torch_engine.runner import LoadedModel, Runner
from engine_adapter.torch_engine.sampling import Sampler
from engine_adapter.torch_engine.scheduler import (
    Active,
    Item,
    Outcome,
    Scheduler,
    check_request,
    compute,
    first_line,
    is_fatal,
)
from engine_adapter.torch_engine.serve import EmbeddedOptions
from engine_adapter.types import KvEvent

T = TypeVar("T")

MAX_FAILED_STEPS = 5
"""After this many steps in a row in which every request failed, the engine counts as broken and ends."""
_log = logging.getLogger("kvpin.engine")


@dataclass(slots=True)
class Counters:
    """Running totals for metrics. Only the engine thread writes them; any thread reads them.

    Attributes:
        prompt_tokens: tokens of all scheduled prompts; `cached_tokens` of them came from cache.
    """

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    running: int = 0
    waiting: int = 0
    finished: dict[str, int] = field(default_factory=dict)


class EngineCore:
    """Runs `model`. `publish` gets the KV events of each step before the step's tokens are delivered.

    Attributes:
        counters: running totals. (Blocks evicted, offloaded, restored: `KvCache.stats`.)
        max_model_len: most tokens of prompt and output together; the model and the cache limit it.
        block_bytes, gpu_blocks, host_blocks: sizes of the KV tiers.
    """

    def __init__(
        self, model: LoadedModel, options: EmbeddedOptions, publish: Callable[[list[KvEvent]], None]
    ) -> None:
        """Allocates the KV pool. Raises EngineSpecError when model and options do not fit together."""
        self.counters = Counters()
        self.block_bytes = model.block_bytes(options.tokens_per_block)
        self.gpu_blocks = options.gpu_blocks(
            self.block_bytes,
            context=model.max_model_len,
            available=available_bytes() if model.device == "cpu" else None,
        )
        self.host_blocks = options.host_blocks(self.block_bytes)
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
        storage = _allocate(model, options, self.gpu_blocks, self.host_blocks)
        self._cache = KvCache(
            gpu_blocks=self.gpu_blocks,
            host_blocks=self.host_blocks,
            tokens_per_block=options.tokens_per_block,
            block_bytes=self.block_bytes,
            copier=storage,
            pin_share=options.pin_share,
        )
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
        self._thread: threading.Thread | None = None
        self._failed_steps = 0
        self._failure: str | None = None

    # --- from any thread -------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """True from `start` until `stop`, or until the engine dies."""
        return self._open

    def start(self) -> None:
        """Starts the thread. Raises EngineUnavailable the second time: an engine runs once."""
        if self._thread is not None:
            raise EngineUnavailable("this engine has been started before")
        self._open = True
        self._thread = threading.Thread(target=self._supervise, name="kvpin-engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after its step. Requests in flight finish as `cancelled`. Blocks until done."""
        with self._wake:
            self._open = False
            self._wake.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def wait(self) -> str | None:
        """Blocks until the started engine has ended; returns why it died, None after `stop`."""
        if self._thread is not None:
            self._thread.join()
        return self._failure

    def submit(self, request: GenerationRequest, on_output: OnOutput) -> None:
        """Queues a request; thread-safe.

        Raises:
            RequestRefused: the request can never run, or its id is in flight already.
            EngineUnavailable: the engine is not running.
        """
        check_request(request, self._model, self.max_model_len)
        active = self._activate(request, on_output)
        with self._wake:
            if request.request_id in self._in_flight:
                raise RequestRefused(
                    f"a request {request.request_id!r} is in flight already", param="request_id"
                )
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

    def _activate(self, request: GenerationRequest, on_output: OnOutput) -> Active:
        params = request.sampling
        ends = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            ends |= self._model.eos_token_ids
        room = self.max_model_len - len(request.token_ids)
        sampler = Sampler(
            params,
            request.token_ids,
            answered=request.answered,
            ends=ends,
            vocab_size=self._model.vocab_size,
            seed=self._seeds.getrandbits(63),
            constraint=request.constraint,
        )
        limit = room if params.max_tokens is None else min(params.max_tokens, room)
        return Active(request, on_output, sampler, ends=ends, limit=limit)

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
        active = self._in_flight.get(request_id)
        if active is not None:
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
        items = self._plan()
        outputs: list[tuple[Active, list[Output]]] = []
        if items:
            self._announce_scheduled(items)
            outputs = self._record(items, self._compute(items))
        self._publish_events()
        for active, tokens in outputs:
            self._deliver(active, tokens)
        self.counters.steps += 1
        self.counters.preemptions = self._scheduler.preemptions

    def _plan(self) -> list[Item]:
        """The items of this step. A request whose KV cannot be copied ends; any other error ends the engine,
        as nobody knows what the cache holds after it."""
        try:
            items = self._scheduler.plan()
        except CopyFailed as error:
            if self._scheduler.planning is None:
                raise
            self._fail(self._scheduler.planning, error)
            self._count_failed_step(error)
            return []
        if not items:
            self._refuse_first()
        return items

    def _compute(self, items: list[Item]) -> list[Outcome]:
        try:
            return compute(self._runner, items)
        except Exception as error:
            # One of these requests broke the device. Each gets a final error, so that it cannot break another
            # engine in a retry.
            for item in items:
                self._finish(item.active, "error", _describe(error))
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

    def _record(self, items: list[Item], outcomes: list[Outcome]) -> list[tuple[Active, list[Output]]]:
        """Enters the outcomes into the cache and the requests; returns the outputs to deliver. Ends the
        requests that failed. Raises when the engine is to end, see `MAX_FAILED_STEPS`."""
        outputs: list[tuple[Active, list[Output]]] = []
        failure: Exception | None = None
        for item, outcome in zip(items, outcomes, strict=True):
            active = item.active
            if isinstance(outcome, RequestRefused):
                self._finish(active, "refused", str(outcome), outcome.param)
            elif isinstance(outcome, Exception):
                failure = outcome
                self._fail(active, outcome)
            else:
                self._cache.advance(active.sequence, item.count)
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

    def _announce_scheduled(self, items: list[Item]) -> None:
        for item in items:
            if item.first:
                active = item.active
                cached = len(active.sequence.path) * self._cache.tokens_per_block
                self.counters.prompt_tokens += len(active.request.token_ids)
                self.counters.cached_tokens += cached
                self._deliver(active, [Scheduled(cached)])

    def _refuse_first(self) -> None:
        """Ends the first waiting request: the cache has no room for it although nothing else runs."""
        active = self._scheduler.waiting[0]
        pinned = self._cache.pinned_blocks
        message = f"the KV cache has no room for this request beside {pinned} pinned blocks"
        self._finish(active, "cancelled", message)

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
        events = self._cache.tree.journal.drain()
        if events:
            self._publish(events)


def _allocate(model: LoadedModel, options: EmbeddedOptions, gpu_blocks: int, host_blocks: int) -> KvStorage:
    try:
        return KvStorage(
            model.layers,
            gpu_blocks=gpu_blocks,
            host_blocks=host_blocks,
            tokens_per_block=options.tokens_per_block,
            device=torch.device(model.device),
            dtype=model.module.dtype,
        )
    except (RuntimeError, MemoryError, OSError, OverflowError) as error:
        raise EngineSpecError(
            f"cannot allocate {gpu_blocks} + {host_blocks} KV blocks of "
            f"{model.block_bytes(options.tokens_per_block)} bytes: {first_line(error)}"
        ) from error


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
