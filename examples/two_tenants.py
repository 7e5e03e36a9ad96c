"""Two tenants, one prompt: neither sees the other's KV, not even by the timing of answers.

Start kvpin with a key for each:

    kvpin serve --reuse --api-key alice-key --api-key bob-key
    python examples/two_tenants.py --keys alice-key bob-key
"""

import argparse
import time

from openai import OpenAI
from shared import cached_tokens, first_model, one_line_errors


def main() -> None:
    """Asks the same prompt twice as the first tenant and twice as the second."""
    parser = argparse.ArgumentParser(description="Tenant isolation through kvpin.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--keys", nargs=2, default=["alice-key", "bob-key"])
    arguments = parser.parse_args()

    document = f"Contract {time.time_ns()}. " + " ".join(f"Clause {n} holds." for n in range(100))
    found = []
    for name, key in (("first", arguments.keys[0]), ("second", arguments.keys[1])):
        client = OpenAI(base_url=arguments.base_url, api_key=key)
        model = first_model(client)
        for turn in (1, 2):
            answer = client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": document}], max_tokens=4, temperature=0
            )
            usage = answer.usage
            cached = cached_tokens(usage)
            print(f"{name} tenant, request {turn}: {cached} of {usage.prompt_tokens} prompt tokens cached")
            found.append(cached)
    if found[2] > 0:
        print("These keys belong to one tenant: start kvpin with --api-key for each of them.")


if __name__ == "__main__":
    with one_line_errors():
        main()
