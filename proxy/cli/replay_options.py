"""The options of `kvpin replay`, and what they ask for. Errors name the option."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from proxy.cli.options import option
from proxy.replay.units import AmountError, parse_amount, parse_count, parse_tokens

if TYPE_CHECKING:
    from proxy.replay.plan import ReplayPlan
    from proxy.replay.simulated_engine import EngineModel

_MODELS = ("fifo", "chunked")
# Options that cannot be given together, and why.
_APART = (
    ("load", "speedup", "both set when requests arrive; give one of them"),
    ("target_p99", "engines", "the search finds the number; bound it by --max-engines"),
    ("target_p99", "load", "a load grows with the engines; say --speedup instead"),
)


class ReplayOptionError(ValueError):
    """An option that cannot be used; the message says which and why."""


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """The options, in the order of the help."""

    # The simulated engines.
    engines: str | None = option(
        "N[,N…]", "How many engines [those that the recording names, else 4].", show_default=False
    )
    gpu_tokens: str = option("SIZE[,SIZE…]", "KV on the GPU of each engine: tokens or bytes.", "500k")
    host_tokens: str = option("SIZE", "KV on its host tier: tokens or bytes; 0: none.", "0")
    bytes_per_token: str | None = option("BYTES", "KV bytes of a token, if sizes are in bytes: 128KiB.")
    model: str = option("fifo|chunked", "fifo: prefill alone; chunked: with decode.", "fifo")
    prefill_rate: str = option("TOKENS", "Prompt tokens an engine computes per second.", "20k")
    restore_rate: str = option("TOKENS", "Tokens per second from its host tier.", "200k")
    context_tokens: str = option(
        "TOKENS", "Context at which attention takes half the time; 0: prefill is linear.", "0"
    )
    chunk_tokens: str = option("TOKENS", "Tokens of a step with prefill.", "2048")
    decode_step_ms: float = option("MS", "Time of a decode step.", 15.0, min=0)
    decode_stream_ms: float = option("MS", "Time each stream adds to a step.", 0.3, min=0)
    # Which runs.
    load: float | None = option("SHARE", "Scale arrivals to this utilisation, if nothing were cached: 0.9.")
    speedup: float | None = option("TIMES", "Arrivals this many times faster than recorded [1].")
    target_p99: float | None = option(
        "SECONDS", "Find how many engines keep this p99 TTFT, in place of --engines."
    )
    max_engines: int = option("N", "The most that --target-p99 tries.", 64, min=1)
    policies: str | None = option(
        "NAME[,NAME…]", "all, ablations, or some: kvpin,sglang,oracle [all; with --target-p99 kvpin]."
    )
    seeds: str = option("N[,N…]", "0: arrivals as recorded; others vary.", "0")
    limit: int | None = option("N", "Read only this many lines.", min=1)
    model_name: str | None = option("NAME", "Which model of a recording of several.")
    jobs: int | None = option("N", "Processes [one a CPU].", min=1)
    # What is written.
    json_path: Path | None = option("FILE", "Write every run as JSON; - prints.", None, "--json")
    csv_path: Path | None = option("FILE", "Write every run as CSV; - prints.", None, "--csv")
    plot_path: Path | None = option("FILE", "Draw a PNG.", None, "--plot")
    html_path: Path | None = option(
        "FILE", "Write curves and table as one HTML file; - prints.", None, "--html"
    )

    @property
    def paths(self) -> list[Path]:
        """The files that are written."""
        named = (self.json_path, self.csv_path, self.plot_path, self.html_path)
        return [path for path in named if path is not None]

    def models(self) -> tuple[EngineModel, ...]:
        """The simulated engine, in each size of `gpu_tokens`. Raises ReplayOptionError."""
        from proxy.replay.simulated_engine import EngineModel  # noqa: PLC0415 - the other commands start quicker

        if self.model not in _MODELS:
            raise ReplayOptionError(f"--model {self.model!r}: must be {' or '.join(_MODELS)}")
        self._check_numbers("decode_step_ms", "decode_stream_ms", are="0 or more")
        if self.decode_step_ms + self.decode_stream_ms <= 0:
            raise ReplayOptionError(
                "--decode-step-ms and --decode-stream-ms: one of them must be more than 0"
            )
        per_token = None
        if self.bytes_per_token is not None:
            per_token = self._read("bytes_per_token", lambda text: parse_amount(text)[0], 1)

        def tokens(text: str) -> int:
            return parse_tokens(text, per_token)

        sizes = self._read_all("gpu_tokens", tokens, 1)
        smallest = EngineModel(
            gpu_tokens=min(sizes),
            host_tokens=self._read("host_tokens", tokens),
            prefill_tok_s=self._read("prefill_rate", parse_count, 1),
            restore_tok_s=self._read("restore_rate", parse_count, 1),
            context_tokens=self._read("context_tokens", parse_count),
            chunked=self.model == "chunked",
            chunk_tokens=self._read("chunk_tokens", parse_count, 1),
            step_s=self.decode_step_ms / 1000,
            stream_s=self.decode_stream_ms / 1000,
        )
        return tuple(replace(smallest, gpu_tokens=size) for size in sizes)

    def plan(self) -> ReplayPlan:
        """The runs. Raises ReplayOptionError."""
        from proxy.replay.plan import P99Target, ReplayPlan  # noqa: PLC0415 - see above

        models = self.models()
        for one, other, why in _APART:
            if getattr(self, one) is not None and getattr(self, other) is not None:
                raise ReplayOptionError(f"{_flag(one)} and {_flag(other)}: {why}")
        self._check_numbers("load", "speedup", "target_p99", are="more than 0")
        if self.target_p99 is not None and len(models) > 1:
            raise ReplayOptionError("--target-p99 and --gpu-tokens: the search is for engines of one size")
        return ReplayPlan(
            models=models,
            engines=self._read_all("engines", parse_count, 1) if self.engines is not None else (),
            policies=self._policies(),
            seeds=self._read_all("seeds", parse_count),
            load=self.load,
            speedup=self.speedup or 1.0,
            target=P99Target(self.target_p99, self.max_engines) if self.target_p99 is not None else None,
        )

    def _policies(self) -> tuple[str, ...]:
        """Those that are named, else all; with a target kvpin, and never the oracle, which has no times."""
        from proxy.replay.policy_names import ORACLE, resolve  # noqa: PLC0415 - see above

        try:
            names = resolve((self.policies or ("all" if self.target_p99 is None else "kvpin")).split(","))
        except ValueError as error:
            raise ReplayOptionError(f"--policies: {error}") from error
        if self.target_p99 is None:
            return names
        if names == (ORACLE,):
            raise ReplayOptionError(f"--target-p99: the policy {ORACLE} has no times")
        return tuple(name for name in names if name != ORACLE)

    def _check_numbers(self, *names: str, are: str) -> None:
        """Raises ReplayOptionError for an option that is not what all of them `are`."""
        for name in names:
            value = getattr(self, name)
            is_positive = value is None or value > 0 or (value == 0 and are == "0 or more")
            if value is not None and not (isfinite(value) and is_positive):
                raise ReplayOptionError(f"{_flag(name)} {value:g}: must be a number, {are}")

    def _read(self, name: str, parse: Callable[[str], int], least: int = 0, text: str | None = None) -> int:
        """The number that an option, or `text` of it, stands for; raises ReplayOptionError."""
        text = getattr(self, name) if text is None else text
        try:
            number = parse(text)
        except AmountError as error:
            raise ReplayOptionError(f"{_flag(name)}: {error}") from error
        if number < least:
            raise ReplayOptionError(f"{_flag(name)} {text}: must be {least:,} or more")
        return number

    def _read_all(self, name: str, parse: Callable[[str], int], least: int = 0) -> tuple[int, ...]:
        """The numbers of an option with several, each once; raises ReplayOptionError."""
        parts = getattr(self, name).split(",")
        return tuple(dict.fromkeys(self._read(name, parse, least, part) for part in parts))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
