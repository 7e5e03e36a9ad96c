"""The answers of the mock engines of `chaos.py`: each engine has another greedy text for the same prompt.

An answer is a function of the prompt, its longest length and the engine's number. All engines of a prompt
begin alike; most then differ (`STYLES`). A stream that another engine continues is right only if its text is
the whole text of one engine.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from router_work import words
from xxhash import xxh3_64_intdigest

MAX_ENGINES = 8
_ODD = (" é", " 😀", " 你好", "\u2028", '"', "\\", "\n\n", "\t")
_MARKS = (
    "[DONE]",
    "\n\ndata: [DONE]\n\n",
    '"finish_reason":"stop"',
    '{"error": {"message": "no"}}',
    "data: {",
)


@dataclass(frozen=True, slots=True)
class Told:
    """The answer of one engine.

    Attributes:
        pieces: the text of each chunk of the stream.
        finish: the reason of the end; None for a stream that just stops, which no client may take for whole.
    """

    pieces: tuple[str, ...]
    finish: str | None

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.pieces)


_Base = list[str]


def _alike(base: _Base, _at: int, _own: random.Random) -> _Base:
    return base


def _other_words(base: _Base, at: int, own: random.Random) -> _Base:
    return base[:at] + _words(own, len(base) - at)


def _early_end(base: _Base, _at: int, own: random.Random) -> _Base:
    return base[: own.randint(1, len(base))]


def _repeats(base: _Base, at: int, own: random.Random) -> _Base:
    return [*base[: at // 2], *["ab"] * own.randint(1, len(base) - at // 2), "!"][: len(base)]


def _end_marks(base: _Base, at: int, own: random.Random) -> _Base:
    rest = base if own.random() < 0.5 else _words(own, len(base))
    return [*base[:at], _MARKS[len(base[at]) % len(_MARKS)], *rest[at + 1 :]]


def _divided(base: _Base, _at: int, own: random.Random) -> _Base:
    """Divides the text into other pieces."""
    text, pieces = "".join(base), []
    while text and len(pieces) < len(base) - 1:
        size = own.randint(1, 2 * len(text) // (len(base) - len(pieces)) + 1)
        pieces.append(text[:size])
        text = text[size:]
    return [*pieces, text] if text else pieces


STYLES: tuple[Callable[[_Base, int, random.Random], _Base], ...] = (
    _alike,
    _other_words,
    _early_end,
    _repeats,
    _end_marks,
    _divided,
)
# Of prompts whose stream just stops, on one of the engines.
_STOPS_SHARE = 0.03


def told(prompt: Sequence[int], count: int, engine: int) -> Told:
    """The whole answer of an engine to a prompt, in at most `count` pieces; `count` is at least 2."""
    key = xxh3_64_intdigest(array("i", prompt).tobytes(), seed=count)
    shared, own = random.Random(key), random.Random(key * MAX_ENGINES + engine)  # noqa: S311 - not for secrets
    base, at = _words(shared, count), shared.randrange(count)
    pieces = tuple(shared.choice(STYLES)(base, at, own))
    return Told(pieces, "length" if len(pieces) == count else "stop")


def streamed(prompt: Sequence[int], count: int, engine: int) -> Told:
    """The answer as a stream. Some streams just stop."""
    whole = told(prompt, count, engine)
    if stopper(prompt, count) != engine:
        return whole
    return Told(whole.pieces[: len(whole.pieces) // 2], None)


def stopper(prompt: Sequence[int], count: int) -> int | None:
    """The engine whose stream of this answer just stops; None for most prompts."""
    shared = random.Random(xxh3_64_intdigest(array("i", prompt).tobytes(), seed=count + 1))  # noqa: S311
    return shared.randrange(MAX_ENGINES) if shared.random() < _STOPS_SHARE else None


def _words(dice: random.Random, count: int) -> _Base:
    known = _texts()
    return [dice.choice(_ODD) if dice.random() < 0.05 else dice.choice(known) for _ in range(count)]


_known: list[str] = []


def _texts() -> list[str]:
    if not _known:
        _known.extend(words().values())
    return _known
