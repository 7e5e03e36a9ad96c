"""p-tuning tables through the OpenAI API: fake token ids, and KV that only the same table shares.

Registers two small tables with kvpin and asks with each of them. Only another request with the first table
reuses the first table's prompt.

    python examples/p_tuning.py [--base-url http://127.0.0.1:8000/v1] [--vocab-size 4096] [--hidden 256]
"""

import argparse

import httpx
import numpy as np
from openai import OpenAI
from safetensors.numpy import save
from shared import (
    add_admin_argument,
    add_server_arguments,
    admin_url,
    cached_tokens,
    first_model,
    one_line_errors,
)

ROWS = 32


def table(hidden: int, seed: int) -> bytes:
    """`[ROWS, hidden]` float32 values as safetensors bytes."""
    values = np.random.default_rng(seed).normal(0, 0.02, (ROWS, hidden))
    return save({"prompt_table": values.astype(np.float32)})


def main() -> None:
    """Runs the demonstration."""
    parser = argparse.ArgumentParser(description="Prompt tuning through kvpin.")
    add_server_arguments(parser)
    add_admin_argument(parser)
    parser.add_argument("--vocab-size", type=int, default=4096, help="of the model: fake ids start there")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size of the model")
    arguments = parser.parse_args()

    headers = {"authorization": f"Bearer {arguments.admin_key}"} if arguments.admin_key else {}
    with httpx.Client(base_url=admin_url(arguments.base_url), headers=headers, timeout=60) as admin:
        tables = []
        for seed in (1, 2):
            answer = admin.post(
                "/prompt_tables",
                content=table(arguments.hidden, seed),
                headers={"content-type": "application/octet-stream"},
            )
            answer.raise_for_status()
            tables.append(answer.json())
            print(f"table {tables[-1]['table_id']}, extra id {tables[-1]['extra_id']}")

    client = OpenAI(base_url=arguments.base_url, api_key=arguments.api_key)
    model = first_model(client)
    virtual = [arguments.vocab_size + row for row in range(ROWS)]
    text = list(range(100, 120))
    for name, chosen, ids in (
        ("table 1", tables[0], virtual + text),
        ("table 2, same ids", tables[1], virtual + text),
        ("table 1, other text", tables[0], virtual + [token + 50 for token in text]),
    ):
        answer = client.completions.create(
            model=model,
            prompt=ids,
            max_tokens=8,
            temperature=0,
            extra_body={"prompt_table": chosen["table_id"]},
        )
        cached = cached_tokens(answer.usage)
        print(f"{name:20} cached {cached:3} of {answer.usage.prompt_tokens}: {answer.choices[0].text!r}")


if __name__ == "__main__":
    with one_line_errors():
        main()
