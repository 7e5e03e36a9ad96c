"""The engine: one thread that steps a model over the requests in flight."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from engine_adapter.torch_engine.kv_cache import KvCache
from engine_adapter.torch_engine.model import LoadedModel
from engine_adapter.torch_engine.options import EngineOptions
from engine_adapter.torch_engine.requests import GenerationRequest, OnOutput
from engine_adapter.types import KvEvent

T = TypeVar("T")


@dataclass(slots=True)
class Counters:
    """Running totals for metrics; written by the engine thread alone, read by anyone.

    Attributes:
        prompt_tokens: tokens of all prompts scheduled so far; `cached_tokens` of them came from cache.
        finished: requests by finish reason.
        running, waiting: requests now.
    """

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    running: int = 0
    waiting: int = 0
    finished: dict[str, int] = field(default_factory=dict)


class Engine:
    """Runs `model`; `publish` gets the KV events of each step, before the tokens of that step go out.

    Attributes:
        counters: running totals. (Blocks evicted, offloaded, restored: `KvCache.stats`.)
        max_model_len: longest prompt + output in tokens, by the model and by the size of the cache.
        block_bytes, gpu_blocks, host_blocks: sizes of the KV tiers.
    """

    counters: Counters
    max_model_len: int
    block_bytes: int
    gpu_blocks: int
    host_blocks: int

    def __init__(
        self, model: LoadedModel, options: EngineOptions, publish: Callable[[list[KvEvent]], None]
    ) -> None:
        """Allocates the KV pool. Raises EngineSpecError when model and options do not go together."""
        raise NotImplementedError

    @property
    def alive(self) -> bool:
        """True between `start` and `stop`, unless the thread died."""
        raise NotImplementedError

    def start(self) -> None:
        """Starts the thread."""
        raise NotImplementedError

    def stop(self) -> None:
        """Ends the thread after its step; requests in flight finish as `cancelled`. Blocks until done."""
        raise NotImplementedError

    def submit(self, request: GenerationRequest, on_output: OnOutput) -> None:
        """Queues a request; thread-safe.

        Raises:
            RequestRefused: it can never run: empty, too long, an id in flight, a fake id without a row.
            EngineUnavailable: the engine is not running.
        """
        raise NotImplementedError

    def cancel(self, request_id: str) -> None:
        """Ends a request before the next step, its blocks freed at once; thread-safe. It finishes as
        `cancelled`; an unknown id is fine."""
        raise NotImplementedError

    def call(self, fn: Callable[[KvCache], T]) -> Future[T]:
        """Runs `fn` between steps in the engine thread; its events are published before the future is
        done; thread-safe. Raises EngineUnavailable when the engine is not running."""
        raise NotImplementedError
