"""The figures of a simulated engine: where each comes from, and what follows for the result.

A figure is given as an option, or else was recorded, or else is a default. Defaults fit no engine in
particular, so each is named where the result is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any

from proxy.core.placement.rates import TYPICAL_TOKENS
from proxy.replay.simulated_engine import EngineModel
from proxy.replay.simulator import SEVERAL_SEEDS, ReplayRun, RunResult, quantile_of
from proxy.replay.trace import RecordedEngine, Trace, typical_tok_s


class FigureSource(StrEnum):
    """Where a figure comes from."""

    GIVEN = "given"
    RECORDED = "recorded"
    DEFAULT = "DEFAULT"


# An engine of which nothing is known: the figures of no engine in particular.
DEFAULTS = EngineModel(gpu_tokens=500_000)
# Option of a figure → the recorded figure that it stands for; "" if none is ever recorded.
FIGURES = {
    "gpu_tokens": "gpu_tokens",
    "host_tokens": "host_tokens",
    "prefill_rate": "prefill",
    "restore_rate": "restore_tok_s",
    "chunk_tokens": "",
    "decode_step_ms": "token_s",
    "decode_stream_ms": "interference",
}


def source_of(option: str, recorded: RecordedEngine, *, is_given: bool) -> FigureSource:
    """Where the figure of an option comes from."""
    if is_given:
        return FigureSource.GIVEN
    name = FIGURES[option]
    is_known = bool(name) and getattr(recorded, name) not in (None, ())
    return FigureSource.RECORDED if is_known else FigureSource.DEFAULT


def modelled(recorded: RecordedEngine, *, is_chunked: bool) -> EngineModel:
    """The engine with its recorded figures, and the defaults for the others.

    `interference` is the share that a stream adds to a step of `chunk_tokens`, most of which is prefill.
    """
    model = replace(DEFAULTS, chunked=is_chunked)
    same = {name: getattr(recorded, name) for name in ("gpu_tokens", "host_tokens", "restore_tok_s")}
    known: dict[str, Any] = {**same, "step_s": recorded.token_s}
    if recorded.prefill:
        known |= {"curve": recorded.prefill, "prefill_tok_s": typical_tok_s(recorded.prefill)}
    model = replace(model, **{name: value for name, value in known.items() if value is not None})
    if recorded.interference is None:
        return model
    return replace(model, stream_s=recorded.interference * model.chunk_tokens / model.prefill_tok_s)


def _used(models: Sequence[EngineModel]) -> Iterator[tuple[str, str]]:
    """The figures that the result depends on, each with its option. Without host memory, its figures do not
    count."""
    model = models[0]
    yield "gpu_tokens", f"{' or '.join(f'{each.gpu_tokens:,}' for each in models)} tokens on the GPU"
    prompts = f" in prompts of {TYPICAL_TOKENS:,}" if model.curve else ""
    yield "prefill_rate", f"prefill {model.prefill_tok_s:,.0f} tokens/s{prompts}"
    if model.host_tokens:
        yield "host_tokens", f"{model.host_tokens:,} tokens in host memory"
        yield "restore_rate", f"{model.restore_tok_s:,.0f} tokens/s restored"
    if model.chunked:
        yield "chunk_tokens", f"steps of {model.chunk_tokens:,} tokens"
        yield "decode_step_ms", f"decode {1000 * model.step_s:.3g} ms a step"
        yield "decode_stream_ms", f"{1000 * model.stream_s:.3g} ms more for each stream"


def used_figures(models: Sequence[EngineModel], sources: Mapping[str, FigureSource]) -> str:
    """A sentence with the figures of each engine, and where each comes from."""
    return "each engine: " + ", ".join(f"{text} ({sources[option]})" for option, text in _used(models))


def assumed_figures(models: Sequence[EngineModel], sources: Mapping[str, FigureSource]) -> str:
    """A warning that names the defaults; "" if there are none."""
    assumed = [each for each in _used(models) if sources[each[0]] is FigureSource.DEFAULT]
    if not assumed:
        return ""
    options = " and ".join(f"--{option.replace('_', '-')}" for option, _ in assumed)
    return (
        f"DEFAULTS, NOT YOUR ENGINES: {', '.join(text for _, text in assumed)}; times and numbers of "
        f"engines depend on them: give {options}"
    )


# --- compares replay's times with the recorded ones, on as many engines as were recorded ----------------

# A recording is compared if at least this share of its requests has a measured time: the others may differ.
MIN_MEASURED = 0.9
# A difference of the p99 from that of the nearest run that is worth a warning.
FAR_OFF = 0.2
_P99 = 0.99


def check(
    trace: Trace, model: EngineModel, run_all: Callable[[Sequence[ReplayRun]], Sequence[RunResult]]
) -> tuple[str, bool] | None:
    """A sentence about the p99 that replay predicts for the recorded engines and the one that was measured,
    and whether they are far apart. None if the trace has no measured times.

    The measured p99 is one draw, as that of each run is. So it is compared with the nearest one.
    """
    measured = sorted(request.ttft_s for request in trace.requests if request.ttft_s is not None)
    if not trace.engines or len(measured) < MIN_MEASURED * len(trace.requests):
        return None
    runs = [ReplayRun("kvpin", trace.engines, model, seed=seed) for seed in SEVERAL_SEEDS]
    predicted = sorted(result.ttft_s(_P99) or 0.0 for result in run_all(runs))
    measured_s = quantile_of(measured, _P99)
    ends = dict.fromkeys(f"{predicted[at]:.3g}" for at in (0, -1))
    engines = f"{trace.engines} recorded engine{'s' * (trace.engines > 1)}"
    said = (
        f"on the {engines}, replay predicts a p99 TTFT of {' to '.join(ends)} s in {len(predicted)} runs; "
        f"measured: {measured_s:.3g} s"
    )
    if min(abs(each - measured_s) for each in predicted) <= FAR_OFF * measured_s:
        return f"checked: {said}", False
    other = "fifo" if model.chunked else "chunked"
    return f"DOES NOT FIT: {said}: do not rely on the times here; try --model {other}", True
