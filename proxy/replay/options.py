"""Reads the flags of `kvpin replay` into a plan. Errors name the flag."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isfinite

from proxy.replay.engine import EngineModel
from proxy.replay.plan import Plan, Target
from proxy.replay.registry import ORACLE, resolve
from proxy.replay.units import AmountError, parse_amount, parse_count, parse_tokens

MODELS = ("fifo", "chunked")
MAX_ENGINES = 64


class OptionError(ValueError):
    """An option that cannot be used; the message says which and why."""


def engine_models(
    *,
    gpu_tokens: str,
    host_tokens: str = "0",
    bytes_per_token: str | None = None,
    model: str = "fifo",
    prefill_rate: str = "20k",
    restore_rate: str = "200k",
    context_tokens: str = "0",
    chunk_tokens: str = "2048",
    decode_step_ms: float = 15.0,
    decode_stream_ms: float = 0.3,
) -> tuple[EngineModel, ...]:
    """The simulated engine, in each size of `gpu_tokens`, from the flags of these names.

    Raises:
        OptionError: a flag cannot be used; the message says which and why.
    """
    if model not in MODELS:
        raise OptionError(f"--model {model!r}: must be {' or '.join(MODELS)}")
    per_token = None
    if bytes_per_token is not None:
        per_token = _read("bytes-per-token", bytes_per_token, lambda text: parse_amount(text)[0], least=1)
    for flag, value in (("decode-step-ms", decode_step_ms), ("decode-stream-ms", decode_stream_ms)):
        if not (isfinite(value) and value >= 0):
            raise OptionError(f"--{flag} {value:g}: must be a number, 0 or more")
    if decode_step_ms + decode_stream_ms <= 0:
        raise OptionError("--decode-step-ms and --decode-stream-ms: one of them must be more than 0")

    def tokens(text: str) -> int:
        return parse_tokens(text, per_token)

    sizes = dict.fromkeys(_read("gpu-tokens", part, tokens, least=1) for part in gpu_tokens.split(","))
    smallest = EngineModel(
        gpu_tokens=min(sizes),
        host_tokens=_read("host-tokens", host_tokens, tokens),
        prefill_tok_s=_read("prefill-rate", prefill_rate, parse_count, least=1),
        restore_tok_s=_read("restore-rate", restore_rate, parse_count, least=1),
        context_tokens=_read("context-tokens", context_tokens, parse_count),
        chunked=model == "chunked",
        chunk_tokens=_read("chunk-tokens", chunk_tokens, parse_count, least=1),
        step_s=decode_step_ms / 1000,
        stream_s=decode_stream_ms / 1000,
    )
    return tuple(replace(smallest, gpu_tokens=size) for size in sizes)


def plan(
    models: Sequence[EngineModel],
    *,
    engines: str | None = None,
    policies: str | None = None,
    seeds: str = "0",
    load: float | None = None,
    speedup: float | None = None,
    target_p99: float | None = None,
    max_engines: int = MAX_ENGINES,
) -> Plan:
    """The runs, from the flags of these names.

    Raises:
        OptionError: a flag cannot be used; the message says which and why.
    """
    if load is not None and speedup is not None:
        raise OptionError("--load and --speedup: both set when requests arrive; give one of them")
    for flag, value in (("load", load), ("speedup", speedup), ("target-p99", target_p99)):
        if value is not None and not (isfinite(value) and value > 0):
            raise OptionError(f"--{flag} {value:g}: must be a number, more than 0")
    if target_p99 is not None and engines is not None:
        raise OptionError(
            "--target-p99 and --engines: the search finds the number; bound it by --max-engines"
        )
    if target_p99 is not None and load is not None:
        raise OptionError("--target-p99 and --load: a load grows with the engines; say --speedup instead")
    if target_p99 is not None and len(models) > 1:
        raise OptionError("--target-p99 and --gpu-tokens: the search is for engines of one size")
    target = Target(target_p99, max_engines) if target_p99 is not None else None
    return Plan(
        models=models,
        engines=_numbers("engines", engines, least=1) if engines is not None else (),
        policies=_policies(policies, target),
        seeds=_numbers("seeds", seeds),
        load=load,
        speedup=speedup or 1.0,
        target=target,
    )


def _policies(names: str | None, target: Target | None) -> tuple[str, ...]:
    """The named policies, else all; with a target kvpin alone, and never the oracle, which has no times."""
    try:
        resolved = resolve((names or ("all" if target is None else "kvpin")).split(","))
    except ValueError as error:
        raise OptionError(f"--policies: {error}") from error
    if target is None:
        return resolved
    timed = tuple(name for name in resolved if name != ORACLE)
    if not timed:
        raise OptionError(f"--target-p99: the policy {ORACLE} has no times")
    return timed


def _read(flag: str, text: str, parse: Callable[[str], int], *, least: int = 0) -> int:
    try:
        number = parse(text)
    except AmountError as error:
        raise OptionError(f"--{flag}: {error}") from error
    if number < least:
        raise OptionError(f"--{flag} {text}: must be {least:,} or more")
    return number


def _numbers(flag: str, text: str, *, least: int = 0) -> tuple[int, ...]:
    """A list of numbers, each once."""
    return tuple(dict.fromkeys(_read(flag, part, parse_count, least=least) for part in text.split(",")))
