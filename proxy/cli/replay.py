"""`kvpin replay`: the command and its options. Errors name the option."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from proxy.cli.client import fail, flag_of, option

if TYPE_CHECKING:
    from proxy.replay.plan import ReplayPlan
    from proxy.replay.simulated_engine import EngineModel
    from proxy.replay.trace import RecordedEngine


# Amounts as people write them: 500k and 2M tokens, 64GiB, 128KiB.
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_BYTES = {
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
}
_SHOWN = 12  # characters that are shown of a very long amount
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)


def parse_amount(text: str) -> tuple[int, bool]:
    """The number, and whether it is in bytes: `k`, `M` and `G` are plain, `kB` and `KiB` are bytes. Raises
    ValueError if the text is not an amount."""
    matched = _AMOUNT.fullmatch(text.strip())
    if matched is not None:
        unit = matched[2].lower()
        factor = _FACTORS.get(unit, _BYTES.get(unit))
        if factor is not None:
            number = float(matched[1]) * factor
            if not isfinite(number):
                raise ValueError(f"{text[:_SHOWN]!r}… is too large")
            return round(number), unit in _BYTES
    raise ValueError(f"{text!r} is not an amount; write 500k, 2M or 64GiB")


def parse_count(text: str) -> int:
    """A number that is not in bytes. Raises ValueError if the text is no such number."""
    number, of_bytes = parse_amount(text)
    if of_bytes:
        raise ValueError(f"{text!r} is in bytes; write a count like 500k or 2M")
    return number


def parse_tokens(text: str, bytes_per_token: int | None) -> int:
    """Tokens, written as a count or as the bytes of their KV. Raises ValueError if the text is neither, or
    is in bytes without `bytes_per_token`."""
    number, of_bytes = parse_amount(text)
    if not of_bytes:
        return number
    if not bytes_per_token:
        raise ValueError(f"{text!r} is in bytes: give --bytes-per-token, such as 128KiB")
    return number // bytes_per_token


_MODELS = ("fifo", "chunked")
# Options that cannot be given together, and why.
_APART = (
    ("load", "speedup", "both set when requests arrive; give one of them"),
    ("target_p99", "engines", "the search finds the number; bound it by --max-engines"),
    ("target_p99", "load", "a load grows with the engines; say --speedup instead"),
)


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """The options, in the order of the help."""

    # The simulated engines.
    engines: str | None = option(
        "N[,N…]", "How many engines [those that the recording names, else 4].", show_default=False
    )
    gpu_tokens: str | None = option(
        "SIZE[,SIZE…]", "KV on the GPU of each engine: tokens or bytes [as recorded, else 500k]."
    )
    host_tokens: str | None = option(
        "SIZE", "KV on its host tier: tokens or bytes; 0: none [as recorded, else 0]."
    )
    bytes_per_token: str | None = option("BYTES", "KV bytes of a token, if sizes are in bytes: 128KiB.")
    model: str = option("fifo|chunked", "fifo: prefill alone; chunked: with decode.", "fifo")
    prefill_rate: str | None = option(
        "TOKENS", "Prompt tokens an engine computes per second [as recorded, else 20k]."
    )
    restore_rate: str | None = option(
        "TOKENS", "Tokens per second from its host tier [as recorded, else 200k]."
    )
    context_tokens: str = option(
        "TOKENS", "Context at which attention takes half the time; 0: prefill is linear.", "0"
    )
    chunk_tokens: str | None = option("TOKENS", "Tokens of a step with prefill [2048].")
    decode_step_ms: float | None = option("MS", "Time of a decode step [as recorded, else 15].", min=0)
    decode_stream_ms: float | None = option(
        "MS", "Time each stream adds to a step [as recorded, else 0.3].", min=0
    )
    # Which runs.
    load: float | None = option("SHARE", "Scale arrivals to this utilisation, if nothing were cached: 0.9.")
    speedup: float | None = option("TIMES", "Arrivals this many times faster than recorded [1].")
    target_p99: float | None = option(
        "SECONDS", "Find how many engines keep this p99 TTFT, in place of --engines."
    )
    margin: float = option("SHARE", "More traffic that --target-p99 leaves room for: 0.2 is 20%.", 0.2, min=0)
    max_engines: int = option("N", "The most that --target-p99 tries.", 64, min=1)
    policies: str | None = option(
        "NAME[,NAME…]", "all, or some: kvpin,sticky,oracle [all; with --target-p99 kvpin]."
    )
    seeds: str | None = option(
        "N[,N…]", "0: arrivals as recorded; others vary [0; with --target-p99 0 to 4]."
    )
    limit: int | None = option("N", "Read only this many lines.", min=1)
    model_name: str | None = option("NAME", "Which model of a recording of several.")
    jobs: int | None = option("N", "Processes [one a CPU].", min=1)
    # What is written.
    json_path: Path | None = option("FILE", "Write every run as JSON; - prints.", None, "--json")
    csv_path: Path | None = option("FILE", "Write every run as CSV; - prints.", None, "--csv")

    @property
    def paths(self) -> list[Path]:
        """The files that are written."""
        return [path for path in (self.json_path, self.csv_path) if path is not None]

    def models(self, recorded: RecordedEngine | None = None) -> tuple[EngineModel, ...]:
        """The simulated engine with its recorded figures, in each size of `gpu_tokens`. Raises
        ValueError."""
        from proxy.replay.figures import modelled  # noqa: PLC0415 - the other commands start quicker
        from proxy.replay.trace import RecordedEngine  # noqa: PLC0415 - likewise

        if self.model not in _MODELS:
            raise ValueError(f"--model {self.model!r}: must be {' or '.join(_MODELS)}")
        self._check_numbers("decode_step_ms", "decode_stream_ms", are="0 or more")
        usual = modelled(recorded or RecordedEngine("median"), is_chunked=self.model == "chunked")
        sizes, given = self._given()
        if self.prefill_rate is not None:
            usual = replace(usual, curve=())
        elif usual.curve and self.context_tokens != "0":
            raise ValueError(
                "--context-tokens: the recorded times of prompts contain it; give --prefill-rate as well"
            )
        model = replace(usual, context_tokens=self._read("context_tokens", parse_count), **given)
        if model.step_s + model.stream_s <= 0:
            raise ValueError("--decode-step-ms and --decode-stream-ms: one of them must be more than 0")
        return tuple(replace(model, gpu_tokens=size) for size in sizes or (model.gpu_tokens,))

    def _given(self) -> tuple[tuple[int, ...], dict[str, Any]]:
        """The sizes of GPUs, and the other figures of an engine, as far as options give them. Raises
        ValueError."""
        per_token = None
        if self.bytes_per_token is not None:
            per_token = self._read("bytes_per_token", lambda text: parse_amount(text)[0], 1)
        tokens = partial(parse_tokens, bytes_per_token=per_token)
        read = (
            ("host_tokens", "host_tokens", tokens, 0),
            ("prefill_tok_s", "prefill_rate", parse_count, 1),
            ("restore_tok_s", "restore_rate", parse_count, 1),
            ("chunk_tokens", "chunk_tokens", parse_count, 1),
        )
        given: dict[str, Any] = {
            field: self._read(name, parse, least)
            for field, name, parse, least in read
            if getattr(self, name) is not None
        }
        steps = {"step_s": self.decode_step_ms, "stream_s": self.decode_stream_ms}
        given |= {field: ms / 1000 for field, ms in steps.items() if ms is not None}
        return self._read_all("gpu_tokens", tokens, 1) if self.gpu_tokens is not None else (), given

    def plan(self, recorded: RecordedEngine | None = None) -> ReplayPlan:
        """The runs, for engines with these recorded figures. Raises ValueError."""
        from proxy.replay.figures import FIGURES, source_of  # noqa: PLC0415 - likewise
        from proxy.replay.plan import P99Target, ReplayPlan  # noqa: PLC0415 - the other commands start quicker
        from proxy.replay.trace import RecordedEngine  # noqa: PLC0415 - likewise

        recorded = recorded or RecordedEngine("median")
        models = self.models(recorded)
        for one, other, why in _APART:
            if getattr(self, one) is not None and getattr(self, other) is not None:
                raise ValueError(f"{flag_of(one)} and {flag_of(other)}: {why}")
        self._check_numbers("load", "speedup", "target_p99", are="more than 0")
        self._check_numbers("margin", are="0 or more")
        if self.target_p99 is not None and len(models) > 1:
            raise ValueError("--target-p99 and --gpu-tokens: the search is for engines of one size")
        return ReplayPlan(
            models=models,
            engines=self._read_all("engines", parse_count, 1) if self.engines is not None else (),
            policies=self._policies(),
            seeds=self._seeds(),
            load=self.load,
            speedup=self.speedup or 1.0,
            target=P99Target(self.target_p99, self.max_engines, self.margin)
            if self.target_p99 is not None
            else None,
            sources={
                name: source_of(name, recorded, is_given=getattr(self, name) is not None) for name in FIGURES
            },
        )

    def _seeds(self) -> tuple[int, ...]:
        from proxy.replay.simulator import SEVERAL_SEEDS  # noqa: PLC0415 - see above

        if self.seeds is not None:
            return self._read_all("seeds", parse_count)
        return (0,) if self.target_p99 is None else SEVERAL_SEEDS

    def _policies(self) -> tuple[str, ...]:
        """The named policies, else all. With a target: only kvpin. The oracle has no times to search."""
        from proxy.replay.rules import ORACLE, resolve  # noqa: PLC0415 - see above

        try:
            names = resolve((self.policies or ("all" if self.target_p99 is None else "kvpin")).split(","))
        except ValueError as error:
            raise ValueError(f"--policies: {error}") from error
        if self.target_p99 is None:
            return names
        if names == (ORACLE,):
            raise ValueError(f"--target-p99: the policy {ORACLE} has no times")
        return tuple(name for name in names if name != ORACLE)

    def _check_numbers(self, *names: str, are: str) -> None:
        """Raises ValueError for an option that is not what all of them `are`."""
        for name in names:
            value = getattr(self, name)
            is_positive = value is None or value > 0 or (value == 0 and are == "0 or more")
            if value is not None and not (isfinite(value) and is_positive):
                raise ValueError(f"{flag_of(name)} {value:g}: must be a number, {are}")

    def _read(self, name: str, parse: Callable[[str], int], least: int = 0, text: str | None = None) -> int:
        """The number that an option, or `text` of it, stands for; raises ValueError."""
        text = getattr(self, name) if text is None else text
        try:
            number = parse(text)
        except ValueError as error:
            raise ValueError(f"{flag_of(name)}: {error}") from error
        if number < least:
            raise ValueError(f"{flag_of(name)} {text}: must be {least:,} or more")
        return number

    def _read_all(self, name: str, parse: Callable[[str], int], least: int = 0) -> tuple[int, ...]:
        """The numbers of an option with several, each once; raises ValueError."""
        parts = getattr(self, name).split(",")
        return tuple(dict.fromkeys(self._read(name, parse, least, part) for part in parts))


# --- `kvpin replay`: the command ------------------------------------------------------------------------

_UNUSABLE = 2


def replay(
    traces: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE…", help="Mooncake jsonl, or recordings that kvpins made at one time; also .gz."
        ),
    ],
    *,
    options: ReplayOptions,
) -> None:
    """Replay a trace on simulated engines.

    Compares placement policies, or finds how many engines the trace needs.
    Exit status 2: the trace or an option cannot be used.
    """
    from proxy.cli.replay_run import run  # noqa: PLC0415 - the other commands start quicker without
    from proxy.replay.trace import TraceError  # noqa: PLC0415 - likewise

    try:
        run(traces, options)
    except (ValueError, TraceError) as error:
        fail(str(error), _UNUSABLE)
