"""An adapter that holds its engine for requests, and readers of answers, for tests of the read path."""

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from engine_adapter import Forecast, Hold, WholeEvents
from tests.fakes import FakeAdapter, FakeEngine


def read_by(reader, chunks) -> bytes:
    """What the client gets of a stream, from the chunks in which it arrives."""
    events = WholeEvents()
    return b"".join(
        [*(reader.feed(events.joined(chunk)) for chunk in chunks), reader.finish(events.take_rest())]
    )


@dataclass
class Reader:
    """`AnswerReader` that notes what it saw. `finish` returns `answer`, or raises it."""

    assembles: bool = False
    cached: int | None = None
    answer: bytes | Exception = b""
    tokens: object = None
    seen: list[bytes] = field(default_factory=list)
    finished: int = 0
    note: str = ""
    takes_pieces: bool = False
    marks: None = None
    finish_ms: float = 0.0

    def feed(self, chunk):
        self.seen.append(chunk)
        return b"" if self.assembles else chunk

    def finish(self, rest=b""):
        self.finished += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return rest + self.answer

    def cached_tokens(self):
        return self.cached

    def prompt_tokens(self):
        return self.tokens


class HoldingAdapter(FakeAdapter):
    """Gives each request the hold that `make` makes of its body, and notes what came of it."""

    def __init__(self, engine: FakeEngine, make: Callable[..., Hold] = Hold, **options):
        super().__init__(engine.id, engine.url, **options)
        self.make = make
        self.foreseen: Forecast | None = None
        self.asked: list[tuple] = []
        self.ended: list[type[BaseException] | None] = []  # what each hold ended with, None for all well
        self.one_ended = asyncio.Event()

    def forecast(self, prompt):
        return self.foreseen

    @asynccontextmanager
    async def hold(self, path, body, prompt):
        self.asked.append((path, prompt))
        try:
            yield self.make(body)
        except BaseException as error:
            self.ended.append(type(error))
            raise
        else:
            self.ended.append(None)
        finally:
            self.one_ended.set()
