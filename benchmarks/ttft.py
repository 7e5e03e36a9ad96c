"""Time to first token of the second question about a document, with reuse and without.

Two embedded engines serve a random-weight model large enough for a visible prefill (about 100M parameters,
made once in the user's cache directory). Each round asks two different questions about a new table and then
the second one again, as `examples/ttft_demo.py` does. Without reuse requests alternate over the engines.

    python benchmarks/ttft.py [--rounds 5] [--rows 150] [--model DIR]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from harness import ROOT, kvpin, made_model


def bench_model() -> Path:
    """A Llama of about 100M random weights with the default tokenizer."""
    sizes = ["--layers", "14", "--hidden", "768", "--heads", "12", "--kv-heads", "4"]
    return made_model("bench-100m", *sizes)


def rounds(url: str, count: int, rows: int) -> list[dict[str, dict[str, float]]]:
    """Runs the demonstration `count` times, each with a table of its own."""
    results = []
    for number in range(count):
        command = [sys.executable, str(ROOT / "examples" / "ttft_demo.py"), "--json", "--rows", str(rows)]
        command += ["--base-url", f"{url}/v1", "--seed", str(1000 + number)]
        results.append(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))
    return results


def report(name: str, results: list[dict[str, dict[str, float]]]) -> None:
    """Medians over the rounds."""

    def middle(which: str, figure: str) -> float:
        return statistics.median(result[which][figure] for result in results)

    first, second, repeated = (middle(which, "ttft_s") for which in ("first", "second", "repeated"))
    gap = middle("repeated", "inter_token_s")
    print(
        f"{name:10} {middle('first', 'prompt_tokens'):.0f} tokens | first {first * 1000:.0f} ms | "
        f"second {second * 1000:.0f} ms ({first / second:.1f}x) | same again {repeated * 1000:.0f} ms | "
        f"between tokens {gap * 1000:.1f} ms | same again / between tokens {repeated / gap:.2f} | "
        f"cached {middle('second', 'cached_tokens'):.0f}, {middle('repeated', 'cached_tokens'):.0f}"
    )


def main() -> None:
    """Measures with reuse and without it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=150)
    parser.add_argument("--tokens-per-block", type=int, default=16)
    parser.add_argument("--model", type=Path, help="a model directory instead of the one made here")
    arguments = parser.parse_args()
    model = arguments.model or bench_model()
    blocks = 8192 // arguments.tokens_per_block
    managed = (
        f"embedded: --model {model} --threads 1 "
        f"--kv-blocks {blocks} --tokens-per-block {arguments.tokens_per_block}"
    )
    for name, reuse in (("reuse on", True), ("reuse off", False)):
        with kvpin("--managed", managed, "--managed", managed, reuse=reuse) as url:
            report(name, rounds(url, arguments.rounds, arguments.rows))


if __name__ == "__main__":
    main()
