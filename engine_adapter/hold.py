"""What a request takes of an engine beyond its turn: a forecast of its cost, and a hold while it runs.

Most engines place a request in their cache themselves; there is nothing to foresee or to hold, and their
adapters are `SelfPlaced`. An engine whose cache is cut into slots leaves that to its adapter: `forecast`
says what the request would cost there now, `hold` gives it a slot, brings its KV there first, and reads from
the answer what it leaves behind.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from engine_adapter.body import JsonBody
from engine_adapter.types import KvTarget, TokenIds

RequestBody = JsonBody | AsyncIterator[bytes] | None


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a prompt would cost an engine now, by the engine's own adapter. Times in seconds.

    Attributes:
        cached_tokens: prompt tokens it would report as reused.
        firm: False when it may turn out to be more.
        wait_s: until there is room for it.
        restore_s: to bring its KV from a lower tier, and to save what that overwrites.
        prefill_s: to compute the rest.
        interference_s: what that costs requests that are running.
        regret_s: what is expected to be computed again later because of it.
        why: one sentence for people.
    """

    cached_tokens: int
    firm: bool = True
    wait_s: float = 0.0
    restore_s: float = 0.0
    prefill_s: float = 0.0
    interference_s: float = 0.0
    regret_s: float = 0.0
    why: str = ""


class AnswerReader(Protocol):
    """Reads an answer on its way to the client, and may hold back what the client did not ask for.

    Attributes:
        assembles: the engine streams though the client wants one JSON answer: `finish` gives it.
    """

    assembles: bool

    def feed(self, chunk: bytes) -> bytes:
        """The next bytes of the engine's answer, untouched: of a stream as they come, a JSON answer whole.
        Returns what the client gets of them; b"" while something is held back, and where `assembles`."""

    def finish(self) -> bytes:
        """The answer is over. What was held back, or, where `assembles`, the JSON body to send in place of
        the stream.

        Raises:
            EngineUnavailable: the stream broke off, or the engine put an error in it.
        """

    def cached_tokens(self) -> int | None:
        """Reused prompt tokens, where the engine said so; asked after `finish`."""

    def prompt_tokens(self) -> TokenIds[int] | None:
        """The prompt as the engine tokenised it, where it was asked to tell; asked after `finish`."""


@dataclass(slots=True)
class Hold:
    """A request's hold on an engine.

    Attributes:
        body: what goes to the engine.
        cached_tokens: what the engine will report as reused, None when the placement's word stands.
        firm: False when it may turn out to be more.
        answer: wants to see the answer pass; None when nobody does.
        note: what people should know of how it was served.
    """

    body: RequestBody
    cached_tokens: int | None = None
    firm: bool = True
    answer: AnswerReader | None = None
    note: str = ""


class SelfPlaced:
    """For adapters of engines that place requests in their cache themselves."""

    def forecast(self, prompt: KvTarget) -> Forecast | None:  # noqa: ARG002 - part of the contract
        """See `EngineAdapter.forecast`."""
        return None

    def hold(
        self,
        path: str,  # noqa: ARG002 - likewise
        body: RequestBody,
        prompt: KvTarget | None,  # noqa: ARG002 - likewise
    ) -> AbstractAsyncContextManager[Hold]:
        """See `EngineAdapter.hold`."""
        return nullcontext(Hold(body))
