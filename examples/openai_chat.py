"""The OpenAI SDK with kvpin: only `base_url` is special.

python examples/openai_chat.py [--base-url http://127.0.0.1:8000/v1] [--api-key KEY]
"""

import argparse

from openai import OpenAI
from shared import add_server_arguments, cached_tokens, first_model, one_line_errors


def main() -> None:
    """Asks once, then again as a stream."""
    parser = argparse.ArgumentParser(description="Chat through kvpin with the OpenAI SDK.")
    add_server_arguments(parser)
    arguments = parser.parse_args()

    client = OpenAI(base_url=arguments.base_url, api_key=arguments.api_key)
    model = first_model(client)
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Name three uses of a lighthouse."},
    ]

    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=32)
    print(f"{model}: {answer.choices[0].message.content}")
    print(f"prompt tokens {answer.usage.prompt_tokens}, of them cached {cached_tokens(answer.usage)}")

    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            print(chunk.choices[0].delta.content, end="", flush=True)
        if chunk.usage:
            print(f"\nprompt tokens {chunk.usage.prompt_tokens}, of them cached {cached_tokens(chunk.usage)}")


if __name__ == "__main__":
    with one_line_errors():
        main()
