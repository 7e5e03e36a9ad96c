"""Options of `kvpin replay`, each with its help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

TraceFile = Annotated[
    Path, typer.Argument(metavar="FILE", help="Mooncake jsonl or kvpin's recording, plain or .gz.")
]

# --- the simulated engines -------------------------------------------------------------------------

Engines = Annotated[
    str | None,
    typer.Option(
        metavar="N[,N…]",
        help="How many engines [those that the recording names, else 4].",
        show_default=False,
    ),
]
GpuTokens = Annotated[
    str, typer.Option(metavar="SIZE[,SIZE…]", help="KV on the GPU of each engine: tokens or bytes.")
]
HostTokens = Annotated[
    str, typer.Option(metavar="SIZE", help="KV on its host tier: tokens or bytes; 0: none.")
]
BytesPerToken = Annotated[
    str | None,
    typer.Option(metavar="BYTES", help="KV bytes of a token, if sizes are in bytes: 128KiB."),
]
Model = Annotated[
    str, typer.Option(metavar="fifo|chunked", help="fifo: prefill alone; chunked: with decode.")
]
PrefillRate = Annotated[
    str, typer.Option(metavar="TOKENS", help="Prompt tokens an engine computes per second.")
]
RestoreRate = Annotated[str, typer.Option(metavar="TOKENS", help="Tokens per second from its host tier.")]
ContextTokens = Annotated[
    str,
    typer.Option(
        metavar="TOKENS", help="Context at which attention takes half the time; 0: prefill is linear."
    ),
]
ChunkTokens = Annotated[str, typer.Option(metavar="TOKENS", help="Tokens of a step with prefill.")]
DecodeStepMs = Annotated[float, typer.Option(metavar="MS", min=0, help="Time of a decode step.")]
DecodeStreamMs = Annotated[float, typer.Option(metavar="MS", min=0, help="Time each stream adds to a step.")]

# --- which runs ------------------------------------------------------------------------------------

Load = Annotated[
    float | None,
    typer.Option(metavar="SHARE", help="Scale arrivals to this utilisation, if nothing were cached: 0.9."),
]
Speedup = Annotated[
    float | None, typer.Option(metavar="TIMES", help="Arrivals this many times faster than recorded [1].")
]
TargetP99 = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="Find how many engines keep this p99 TTFT, in place of --engines."),
]
MaxEngines = Annotated[int, typer.Option(metavar="N", min=1, help="The most that --target-p99 tries.")]
Policies = Annotated[
    str | None,
    typer.Option(
        metavar="NAME[,NAME…]",
        help="all, ablations, or some: kvpin,sglang,oracle [all; with --target-p99 kvpin].",
    ),
]
Seeds = Annotated[str, typer.Option(metavar="N[,N…]", help="0: arrivals as recorded; others vary.")]
Limit = Annotated[int | None, typer.Option(metavar="N", min=1, help="Read only this many lines.")]
ModelName = Annotated[str | None, typer.Option(metavar="NAME", help="Which model of a recording of several.")]
Jobs = Annotated[int | None, typer.Option(metavar="N", min=1, help="Processes [one a CPU].")]

# --- what is written -------------------------------------------------------------------------------

JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write every run as JSON; - prints.")
]
CsvFile = Annotated[
    Path | None, typer.Option("--csv", metavar="FILE", help="Write every run as CSV; - prints.")
]
PlotFile = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw a PNG.")]
HtmlFile = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Write curves and table as one HTML file; - prints."),
]
