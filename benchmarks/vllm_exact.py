"""Does a real vLLM report the reuse that kvpin predicted?

Two real vLLMs (on a CPU, 9 MB model, few blocks of 32 tokens) behind one kvpin. A mixed load through the
openai SDK: growing chats and completions of two tenants, streamed and not, some with their own salts or on a
LoRA adapter, more than the caches hold. Halfway everything is flushed. Later one vLLM is killed (`kill -9`)
under traffic and restarted.

    python benchmarks/vllm_exact.py [--requests 300] [--talks 8] [--blocks 160] [--seed 1]

Installs vLLM on first use: see scripts/vllm.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from harness import ROOT

sys.path.insert(0, str(ROOT))
from tests.vllm_live.mixed_run import KVPIN_FLAGS, OPTIONS, TALKS, MixedRun
from tests.vllm_live.vllm_world import vllm_world


def main() -> None:
    """Runs it and prints what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--talks", type=int, default=TALKS, help="at a time")
    parser.add_argument("--blocks", type=int, default=OPTIONS.blocks, help="of each vLLM")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as logs,
        vllm_world(
            Path(logs), replace(OPTIONS, blocks=arguments.blocks), servers=2, kvpin_flags=KVPIN_FLAGS
        ) as world,
    ):
        report = asyncio.run(
            MixedRun(world, seed=arguments.seed, talks=arguments.talks).play(arguments.requests)
        )
    print(*report.lines(), sep="\n")


if __name__ == "__main__":
    main()
