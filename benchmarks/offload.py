"""The gain of offload and restore: time to first token cold, restored, restored on demand, and warm.

One embedded engine serves the 100M model of `benchmarks/ttft.py`. Each round asks about a new document
(cold), offloads its KV to host memory, restores it and asks again. Then it offloads the KV once more and asks
without restoring, so that the engine restores on demand, and asks once more while it is warm. All answers
must be equal.

    python benchmarks/offload.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import httpx
from harness import kvpin
from ttft import bench_model


def ask(client: httpx.Client, body: dict[str, object]) -> tuple[float, str]:
    """Seconds to the first token, and the streamed text."""
    started, first, text = time.perf_counter(), 0.0, []
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        for line in answer.iter_lines():
            if '"content":"' in line:
                first = first or time.perf_counter() - started
                text.append(line.partition('"content":"')[2].partition('"')[0])
    return first, "".join(text)


def move(client: httpx.Client, verb: str, target: dict[str, object]) -> tuple[float, int]:
    """Seconds an operation took, and the blocks it moved."""
    started = time.perf_counter()
    operation = client.post(f"/admin/v1/{verb}", json=target).raise_for_status().json()
    return time.perf_counter() - started, sum(engine["done"] for engine in operation["engines"])


def main() -> None:
    """Measures and prints medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--entries", type=int, default=300)
    parser.add_argument("--model", type=Path)
    arguments = parser.parse_args()
    model = arguments.model or bench_model()
    times: dict[str, list[float]] = {"cold": [], "restored": [], "restored on demand": [], "warm": []}
    moves: dict[str, list[float]] = {"offload": [], "restore": []}
    same, blocks = 0, 0
    engine = f"embedded: --model {model} --threads 1 --kv-blocks 512 --host-cache-bytes 512MiB"
    with kvpin("--managed", engine) as url, httpx.Client(base_url=url, timeout=300) as client:
        name = client.get("/v1/models").json()["data"][0]["id"]
        for number in range(arguments.rounds):
            log = f"Log {number}: " + " ".join(f"entry {n} was fine." for n in range(arguments.entries))
            target = {"model": name, "messages": [{"role": "user", "content": log}]}
            body = {**target, "max_tokens": 16, "temperature": 0, "stream": True}
            answers = []
            for kind, seen in times.items():
                if kind.startswith("restored"):
                    seconds, blocks = move(client, "offload", target)
                    moves["offload"].append(seconds)
                if kind == "restored":
                    moves["restore"].append(move(client, "restore", target)[0])
                first, text = ask(client, body)
                seen.append(first)
                answers.append(text)
            same += len(set(answers)) == 1
    cold = statistics.median(times["cold"])
    for kind, seconds in times.items():
        middle = statistics.median(seconds)
        print(f"{kind:20} {middle * 1000:8.1f} ms to the first token ({cold / middle:.1f}x)")
    for kind, seconds in moves.items():
        print(f"{kind:20} {statistics.median(seconds) * 1000:8.1f} ms for {blocks} blocks")
    print(f"same answer in {same} of {arguments.rounds} rounds")


if __name__ == "__main__":
    main()
