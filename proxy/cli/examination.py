"""An examined engine as text for people: what `kvpin doctor` shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.text import Text

from proxy.cli.grid import TerminalTable, console


def show_examination(found: dict[str, Any]) -> None:
    """An examined engine, and what keeps kvpin from using it fully."""
    out = console()
    table = TerminalTable(("name", "text"), text="text")
    for name, text in _of_engine(found):
        table.add(Text(name, "bold"), text)
    table.print(out, header=False)
    for number, finding in enumerate(found["findings"], 1):
        out.print(f"\n{number}. {finding['problem']}", markup=False)
        if finding["remedy"]:
            out.print(f"   → {finding['remedy']}", markup=False)
    if not found["findings"]:
        out.print("\nno findings")


def _of_engine(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "engine", f"{found['kind']} {found['version']}".rstrip() + ", detected" * found["detected"]
    yield "model", found["model"] + "".join(f", LoRA {name}" for name in found["loras"])
    yield "context", f"{found['max_model_len'] or 'unknown'} tokens"
    block = found["tokens_per_block"]
    counts = [
        f"{blocks} on {tier}" for tier in ("gpu", "host") if (blocks := found[f"{tier}_blocks"]) is not None
    ]
    yield "blocks", f"{block or 'unknown'} tokens each" + "".join(f", {count}" for count in counts)
    yield "load", f"{found['running']} running, {found['waiting']} waiting"
    yield "can", ", ".join(found["can"])
    for at, (name, instead) in enumerate(found["cannot"].items()):
        yield "" if at else "cannot", f"{name}: {instead}"
    yield "tokens", found["tokenisation"]["detail"]
    yield "events", found["view"]["detail"]
    probe = found["probe"]
    if probe is not None and probe["error"] is None:
        reported = f"the engine reports {probe['reported']} of {probe['n_tokens']} tokens reused"
        yield "probe", f"sent twice: {reported}, kvpin predicted {probe['predicted']}"
