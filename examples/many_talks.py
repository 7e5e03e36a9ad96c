"""More conversations than the engine has slots: each turn still finds the KV of the conversation's last turn.

Start kvpin on a GGUF with fewer slots than conversations, here 2:

    kvpin serve --reuse --engine 'llama-server: -m model.gguf -np 2 -c 16384'
    python examples/many_talks.py --talks 5
"""

import argparse
import time

from openai import OpenAI
from shared import add_server_arguments, cached_tokens, first_model, one_line_errors


def main() -> None:
    """Asks each conversation about its own document, in rounds."""
    parser = argparse.ArgumentParser(description="More conversations than slots, through kvpin.")
    add_server_arguments(parser)
    parser.add_argument("--talks", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()

    client = OpenAI(base_url=arguments.base_url, api_key=arguments.api_key)
    model = first_model(client)
    talks = [[{"role": "user", "content": document(number)}] for number in range(arguments.talks)]
    for turn in range(arguments.rounds):
        for number, messages in enumerate(talks):
            answer = client.chat.completions.create(
                model=model, messages=messages, max_tokens=16, temperature=0
            )
            usage = answer.usage
            cached = cached_tokens(usage)
            print(f"turn {turn}, talk {number}: {cached:4} of {usage.prompt_tokens} prompt tokens cached")
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            messages.append({"role": "user", "content": "And what does the next entry say?"})


def document(number: int) -> str:
    """A new text."""
    entries = " ".join(f"Entry {entry}: the lamp was lit at {17 + entry % 5}:00." for entry in range(60))
    return f"Log book {number} of {time.time_ns()}. {entries} What does the first entry say?"


if __name__ == "__main__":
    with one_line_errors():
        main()
