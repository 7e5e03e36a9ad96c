"""What a KV cache is worth: two questions about one long table, then the second question again.

Works with any OpenAI endpoint. kvpin sends the second question to the engine that holds the table's KV.

    python examples/ttft_demo.py [--base-url http://127.0.0.1:8000/v1] [--rows 150] [--json]
"""

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass

from openai import OpenAI
from shared import add_server_arguments, cached_tokens, first_model, one_line_errors

QUESTIONS = (
    "Which station has the highest reading? Answer with its name.",
    "How many stations lie in the north? Answer with a number.",
)
REGIONS = ("north", "south", "east", "west")


@dataclass
class Timing:
    """One streamed answer: seconds to the first token, median seconds between tokens, token counts."""

    ttft_s: float
    inter_token_s: float
    prompt_tokens: int
    cached_tokens: int


def table(rows: int, seed: int) -> str:
    """A table of made-up readings. Tables of different seeds differ from the first line on."""
    dice = random.Random(seed)  # noqa: S311 - not for secrets
    lines = [f"Report {seed}: station, region, reading, status"]
    lines += [
        f"S{dice.randrange(10**4):04d}, {dice.choice(REGIONS)}, {dice.uniform(0, 100):.1f}, ok"
        for _ in range(rows)
    ]
    return "\n".join(lines)


def ask(client: OpenAI, model: str, document: str, question: str, max_tokens: int) -> Timing:
    """Streams one answer and times it."""
    started = time.perf_counter()
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": f"{document}\n\n{question}"}],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    times, usage = [], None
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            times.append(time.perf_counter())
        usage = chunk.usage or usage
    gaps = [after - before for before, after in itertools.pairwise(times)]
    if not times:
        sys.exit(f"{model} answered without any text: time to first token cannot be measured.")
    return Timing(
        ttft_s=times[0] - started,
        inter_token_s=statistics.median(gaps) if gaps else 0.0,
        prompt_tokens=usage.prompt_tokens if usage else 0,
        cached_tokens=cached_tokens(usage),
    )


def main() -> None:
    """Asks three times and prints the times."""
    parser = argparse.ArgumentParser(description="Time to first token with and without cached KV.")
    add_server_arguments(parser)
    parser.add_argument("--model", help="default: the first one served")
    parser.add_argument("--rows", type=int, default=150, help="rows of the table")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument(
        "--seed", type=int, default=time.time_ns() % 10**9, help="default: a new table each run"
    )
    parser.add_argument("--json", action="store_true", help="print figures only")
    arguments = parser.parse_args()

    client = OpenAI(base_url=arguments.base_url, api_key=arguments.api_key)
    model = arguments.model or first_model(client)
    # A short request first, so that the connection and lazy initialisation are not measured.
    ask(client, model, "warm-up", "Ready?", 2)
    document = table(arguments.rows, arguments.seed)
    first, second, repeated = (
        ask(client, model, document, question, arguments.max_tokens)
        for question in (*QUESTIONS, QUESTIONS[1])
    )

    ratio = first.ttft_s / second.ttft_s
    if arguments.json:
        rows = {"first": asdict(first), "second": asdict(second), "repeated": asdict(repeated)}
        print(json.dumps({"model": model, "ratio": ratio, **rows}))
        return
    for name, timing in (
        ("first question", first),
        ("second question", second),
        ("the same again", repeated),
    ):
        print(line(name, timing))
    print(verdict(ratio))


def line(name: str, timing: Timing) -> str:
    """One question's figures."""
    return (
        f"{name:16} {timing.ttft_s * 1000:8.1f} ms to the first token, "
        f"{timing.cached_tokens:5} of {timing.prompt_tokens} prompt tokens cached, "
        f"{timing.inter_token_s * 1000:.1f} ms a token after that"
    )


def verdict(ratio: float) -> str:
    """What the cache was worth."""
    return f"The second question was answered {ratio:.1f}x faster than the first."


if __name__ == "__main__":
    with one_line_errors():
        main()
