"""The figures of a run, under the names of `vllm bench serve --save-result`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from proxy.cli.load_test.sender import RequestSample

Figures = dict[str, float | None]


def figures(samples: Sequence[RequestSample], duration_s: float) -> Figures:
    """Times in milliseconds, throughput a second. None where no request tells.

    TTFT: to the first text. TPOT: of each token after the first. ITL: between two parts of an answer.
    E2EL: to the end of the answer.
    """
    done = [sample for sample in samples if not sample.error]
    prompt, output = (
        sum(getattr(sample, name) for sample in done) for name in ("prompt_tokens", "output_tokens")
    )
    cached = [sample.cached_tokens for sample in done if sample.cached_tokens is not None]
    tpot = [(s.latency_s - s.ttft_s) / (s.output_tokens - 1) for s in done if s.output_tokens > 1]
    times = {
        "ttft": [sample.ttft_s for sample in done],
        "tpot": tpot,
        "itl": [gap for sample in done for gap in sample.gaps_s],
        "e2el": [sample.latency_s for sample in done],
    }
    return {
        "completed": len(done),
        "failed": len(samples) - len(done),
        "duration": duration_s,
        "total_input_tokens": prompt,
        "cached_input_tokens": sum(cached) if cached else None,
        "total_output_tokens": output,
        "request_throughput": len(done) / duration_s,
        "output_throughput": output / duration_s,
        "total_token_throughput": (prompt + output) / duration_s,
        **{name: value for kind, values in times.items() for name, value in _spread(kind, values).items()},
    }


def _spread(kind: str, values: Sequence[float]) -> Figures:
    """Mean, median and 99th percentile in milliseconds, interpolated as numpy does."""
    names = [f"{name}_{kind}_ms" for name in ("mean", "median", "p99")]
    if not values:
        return dict.fromkeys(names)
    p99 = statistics.quantiles(values, n=100, method="inclusive")[98] if len(values) > 1 else values[0]
    spread = (statistics.fmean(values), statistics.median(values), p99)
    return {name: value * 1000 for name, value in zip(names, spread, strict=True)}
