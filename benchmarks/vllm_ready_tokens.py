"""Measures what a real vLLM saves if kvpin sends it token ids instead of text.

The prompt has about 8,000 tokens. vLLM holds its beginning already, and its end is new each time, so that
little is left to compute. It goes as text and as ids straight to vLLM, and as text through kvpin, which sends
ids. The three take turns, so that all see the same load of the machine.

    python benchmarks/vllm_ready_tokens.py [--rounds 40]

Installs vLLM on first use: see scripts/vllm.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import httpx
from harness import ROOT

sys.path.insert(0, str(ROOT))
from engine_adapter.prompt.chat import ChatTokenizer
from scripts.make_checkpoint import checkpoint_path
from tests.vllm_live.vllm_world import MODEL, VllmOptions, vllm_world

CONTEXT = 8192
BLOCKS = 800
TOKENS = 7900
_CACHED = re.compile(r'"cached_tokens":\s*(\d+)')


def first_token_s(client: httpx.Client, url: str, prompt: str | list[int]) -> tuple[float, int]:
    """Seconds to the first byte of a streamed answer, and the reused tokens it reports."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    started = time.perf_counter()
    with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        lines = response.iter_lines()
        next(lines)
        seconds = time.perf_counter() - started
        reused = [int(match[1]) for line in lines if (match := _CACHED.search(line))]
    return seconds, reused[-1]


def main() -> None:
    """Runs it and prints the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    tokenizer = ChatTokenizer.load(str(checkpoint_path("model")))
    document = "".join((ROOT / "docs" / name).read_text() for name in ("api.md", "operations.md"))
    document = tokenizer.decode(tokenizer.encode(document, add_special_tokens=True)[:TOKENS])
    options = VllmOptions(blocks=BLOCKS, context=CONTEXT)
    seconds, cached = defaultdict(list), defaultdict(list)
    with (
        tempfile.TemporaryDirectory() as logs,
        vllm_world(Path(logs), options) as world,
        httpx.Client(timeout=600, trust_env=False) as client,
    ):
        server, proxy = world.servers[0].url, world.kvpin.url
        for number in range(-2, rounds):
            for way, url in (("text", server), ("token ids", server), ("text through kvpin", proxy)):
                text = f"{document}\nQuestion {number}, asked as {way}: what is said of it?"
                prompt = (
                    text if way != "token ids" else tokenizer.encode(text, add_special_tokens=True).tolist()
                )
                taken, reused = first_token_s(client, url, prompt)
                if number >= 0:
                    seconds[way].append(taken)
                    cached[way].append(reused)
    medians = {way: statistics.median(each) for way, each in seconds.items()}
    count = len(tokenizer.encode(text, add_special_tokens=True))
    print(
        f"prompts of about {count} tokens, reused {min(map(min, cached.values()))} or more; {rounds} rounds"
    )
    for way, median in medians.items():
        ratio = medians["text"] / median
        print(f"{way:20} {1000 * median:6.1f} ms to the first token (median), {ratio:.2f}x")
    saved = medians["text"] - medians["token ids"]
    print(f"saved by ready ids   {1000 * saved:.1f} ms = {100 * saved / medians['text']:.0f}%")


if __name__ == "__main__":
    main()
