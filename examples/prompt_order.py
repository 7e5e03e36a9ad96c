"""How the order of a prompt decides how much of it is cached: each line is the second of two requests.

python examples/prompt_order.py [--base-url http://127.0.0.1:8000/v1] [--api-key KEY]
"""

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from openai import OpenAI
from shared import add_server_arguments, cached_tokens, first_model, one_line_errors

QUESTIONS = ("Which lamp was lit first?", "Which lamp was lit last?")
FAN_OUT = 6
Request = dict[str, Any]


def document(name: str) -> str:
    """A text that no earlier prompt begins with."""
    entries = " ".join(
        f"Entry {entry}: lamp {entry % 7} was lit at {17 + entry % 5}:00." for entry in range(80)
    )
    return f"Log book {name} of {time.time_ns()}. {entries}"


def user(text: str) -> Request:
    """A message of the user's."""
    return {"role": "user", "content": text}


def chat(*texts: str, **fields: object) -> Request:
    """A chat of one message."""
    return {"messages": [user("\n".join(texts))], **fields}


def tool(letter: str) -> Request:
    """A tool with a long description that no earlier tool has."""
    described = f"Reads column {letter} of log book {time.time_ns()}. " * 8
    return {"type": "function", "function": {"name": f"read_{letter}", "description": described}}


def pairs() -> dict[str, tuple[Request, Request]]:
    """What is tried → the fields of two requests."""
    one, other = QUESTIONS
    a, b, c, d, e, f, g = map(document, "abcdefg")
    tools = [tool(letter) for letter in "abcd"]
    now = str(time.time_ns())
    answered = [{"role": "assistant", "content": "The first."}, user(other)]
    return {
        "document, then question": (chat(a, one), chat(a, other)),
        "question, then document": (chat(one, b), chat(other, b)),
        "time first": (chat("1" + now, c), chat("2" + now, c)),
        "time last": (chat(d, "1" + now), chat(d, "2" + now)),
        "same tools": (chat(e, one, tools=tools), chat(e, other, tools=tools)),
        "tools in another order": (chat(e, one, tools=tools), chat(e, one, tools=tools[::-1])),
        "messages appended": (chat(f, one), {"messages": [user(f"{f}\n{one}"), *answered]}),
        "a message rewritten": (chat(g, one), {"messages": [user(f"{one}\n{g}"), *answered]}),
    }


def main() -> None:
    """Asks, and prints a line for each order."""
    parser = argparse.ArgumentParser(description="How the order of a prompt decides what is cached.")
    add_server_arguments(parser)
    arguments = parser.parse_args()
    client = OpenAI(base_url=arguments.base_url, api_key=arguments.api_key)
    model = first_model(client)

    def ask(fields: Request) -> tuple[int, int, float]:
        """Cached tokens, prompt tokens, seconds."""
        began = time.perf_counter()
        usage = client.chat.completions.create(model=model, max_tokens=1, temperature=0, **fields).usage
        return cached_tokens(usage), usage.prompt_tokens, time.perf_counter() - began

    for name, (first, second) in pairs().items():
        ask(first)
        cached, tokens, took = ask(second)
        print(f"{name}: {cached} of {tokens} tokens cached, {1000 * took:.0f} ms")
    text = document("h")
    asked = [chat(text, f"What does entry {number} say?") for number in range(FAN_OUT)]
    with ThreadPoolExecutor(FAN_OUT) as threads:
        answers = list(threads.map(ask, asked))
    cached, tokens = (sum(answer[at] for answer in answers) for at in (0, 1))
    print(f"{FAN_OUT} questions at once: {cached} of {tokens} tokens cached")


if __name__ == "__main__":
    with one_line_errors():
        main()
