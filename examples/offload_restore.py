"""Moves a prefix to host memory and back through the admin API, then asks again.

The answer is the same as before, and its first token comes sooner than without cached KV.

    python examples/offload_restore.py [--base-url http://127.0.0.1:8000/v1] [--admin-key KEY]
"""

import argparse
import time

import httpx
from openai import OpenAI
from shared import (
    add_admin_argument,
    add_server_arguments,
    admin_url,
    cached_tokens,
    first_model,
    one_line_errors,
)


def main() -> None:
    """Runs the demonstration."""
    parser = argparse.ArgumentParser(description="Offload and restore through kvpin.")
    add_server_arguments(parser)
    add_admin_argument(parser)
    arguments = parser.parse_args()

    client = OpenAI(base_url=arguments.base_url, api_key=arguments.api_key)
    model = first_model(client)
    report = f"Log {time.time_ns()}: " + " ".join(f"entry {n} was fine." for n in range(300))
    messages = [{"role": "user", "content": f"{report}\n\nWhat went wrong?"}]

    headers = {"authorization": f"Bearer {arguments.admin_key}"} if arguments.admin_key else {}
    with httpx.Client(base_url=admin_url(arguments.base_url), headers=headers, timeout=60) as admin:
        cold = ask(client, model, messages, "cold")
        target = {"model": model, "messages": messages}
        for verb in ("offload", "restore"):
            operation = admin.post(f"/{verb}", json=target)
            operation.raise_for_status()
            for engine in operation.json()["engines"]:
                print(f"{verb:8} {engine['engine']}: {engine['done']} blocks, {engine['bytes']} bytes")
            show_tiers(admin)
        again = ask(client, model, messages, "restored")
    print("same answer" if again == cold else "ANOTHER ANSWER: this must not happen")


def ask(client: OpenAI, model: str, messages: list[dict[str, str]], name: str) -> str:
    """Asks once, prints the time to the first token, and returns the answer."""
    started = time.perf_counter()
    first_s, text, cached = None, "", 0
    for chunk in client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=16,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ):
        if chunk.choices and chunk.choices[0].delta.content:
            first_s = first_s or time.perf_counter() - started
            text += chunk.choices[0].delta.content
        if chunk.usage:
            cached = cached_tokens(chunk.usage)
    print(f"{name:8} first token after {(first_s or 0) * 1000:.1f} ms, {cached} tokens cached")
    return text


def show_tiers(admin: httpx.Client) -> None:
    """Prints the blocks that each engine holds."""
    for pool in admin.get("/stats").raise_for_status().json()["pools"]:
        for engine in pool["engines"]:
            kv = engine["kv"]
            if kv and "gpu" in kv:
                gpu, host = kv["gpu"], kv["host"]
                tiers = f"gpu {gpu['cached']} cached, {gpu['free']} free; host {host['cached']} cached"
                print(f"         {engine['id']}: {tiers}")


if __name__ == "__main__":
    with one_line_errors():
        main()
