"""The line of a recording that describes the recording: when it began, and the figures of its engines.

A recording holds it again whenever more is known. The last one of a file counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median_low
from typing import TypeVar

import msgspec

from proxy.core.placement.rates import OWN_PACE, TYPICAL_TOKENS, on_curve

_Number = TypeVar("_Number", int, float)
Curve = tuple[tuple[float, float], ...]

# A line of a recording that begins so is no request.
HEAD = b'{"recording":'


ALL = "all"
"""The name of all rules together."""


class TextBlocks(msgspec.Struct, omit_defaults=True):
    """A prompt's text as hashes of its blocks, for `kvpin advise`; `proxy/observe/prompt_text.py` makes them.

    Attributes:
        ids: of its blocks; the last one is left out if it is not full.
        tools, system: blocks up to the end of the tools, and of the system prompt; 0 without any.
        changed: rule → ids after that rule; only rules that change the prompt.
    """

    ids: list[int]
    tools: int = 0
    system: int = 0
    changed: dict[str, list[int]] = {}


class RecordedEngine(msgspec.Struct, omit_defaults=True):
    """One engine as its kvpin knew it. A figure is missing where it was neither told nor measured.

    Attributes:
        gpu_tokens, host_tokens: KV that it holds on the GPU and in host memory, as it says itself.
        prefill: prompt tokens, and the seconds it takes to compute them: the points of a curve.
        samples: measurements that the curve rests on.
        interference: share that each decoding stream adds to the time of a prefill.
        restore_tok_s: tokens that it restores from host memory in a second.
        token_s: seconds from one token of an answer to the next, the median of streams.
    """

    id: str
    kind: str = ""
    model: str | None = None
    gpu_tokens: int | None = None
    host_tokens: int | None = None
    prefill: list[tuple[float, float]] = []
    samples: int = 0
    interference: float | None = None
    restore_tok_s: float | None = None
    token_s: float | None = None


class Recording(msgspec.Struct):
    """Facts about a recording.

    Attributes:
        began: when it began, in Unix time: `timestamp` 0 of its requests.
        key: equal for recordings whose ids were made with the same key.
        unrecorded: requests that engines got and the recording lacks, because their prompts are not known.
    """

    began: float
    key: str
    unrecorded: int = 0
    engines: list[RecordedEngine] = []


class RecordingLine(msgspec.Struct):
    """The line itself."""

    recording: Recording


@dataclass(frozen=True, slots=True)
class RecordedFigures:
    """The recorded figures of a trace's engines; None where there are none.

    Replay simulates equal engines: each figure is that of the median engine.

    Attributes:
        prefill: points of a curve: prompt tokens, and seconds to compute them.
        differ: a sentence if the engines' prefill rates are far apart; "" if they are not.
    """

    gpu_tokens: int | None = None
    host_tokens: int | None = None
    prefill: Curve = ()
    interference: float | None = None
    restore_tok_s: float | None = None
    token_s: float | None = None
    differ: str = ""


def figures_of(engines: Iterable[RecordedEngine]) -> RecordedFigures:
    """The figures of recorded engines. Of an engine that several kvpins recorded, the best known counts."""
    by_id = groupby(sorted(engines, key=lambda each: each.id), key=lambda each: each.id)
    known = [max(same, key=lambda each: each.samples) for _, same in by_id]
    curves = sorted((tuple(each.prefill) for each in known if each.prefill), key=typical_tok_s)
    return RecordedFigures(
        gpu_tokens=_median(each.gpu_tokens for each in known),
        host_tokens=_median(each.host_tokens for each in known),
        prefill=curves[(len(curves) - 1) // 2] if curves else (),
        interference=_median(each.interference for each in known),
        restore_tok_s=_median(each.restore_tok_s for each in known),
        token_s=_median(each.token_s for each in known),
        differ=_differ(curves),
    )


def _median(values: Iterable[_Number | None]) -> _Number | None:
    known = [value for value in values if value is not None]
    return median_low(known) if known else None


def _differ(curves: Sequence[Curve]) -> str:
    if not curves:
        return ""
    slowest, fastest = typical_tok_s(curves[0]), typical_tok_s(curves[-1])
    if fastest < slowest * OWN_PACE:
        return ""
    return (
        f"the recorded engines differ: they compute {slowest:,.0f} to {fastest:,.0f} prompt tokens/s; "
        "replay simulates equal ones of the median rate"
    )


def typical_tok_s(curve: Curve) -> float:
    """Tokens a second in prompts of `TYPICAL_TOKENS`."""
    lengths, seconds = zip(*curve, strict=True)
    return TYPICAL_TOKENS / on_curve(lengths, seconds, TYPICAL_TOKENS)
