"""A start without a network: four vLLM-like engines name a model that is not here; the hub is silent."""

import json
import socket
import time
from contextlib import ExitStack

from tests.fake_engines.vllm import running_vllm
from tests.live.conftest import running_kvpin

MOST_LINES = 40


def test_all_engines_take_requests_while_the_tokenizer_is_looked_for(tmp_path, monkeypatch):
    with ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        fakes = [stack.enter_context(running_vllm(root="acme/none")) for _ in range(4)]
        flags = [word for fake in fakes for word in ("--engine", f"vllm={fake.url}")]
        kvpin = stack.enter_context(running_kvpin(tmp_path / "log", *flags, tokenised=False))
        assert {engine["state"] for engine in kvpin.engines().values()} == {"ready"}
        # What is new everywhere is spread, and what is known goes where it is.
        served = [ask(kvpin, number) for number in range(8)]
        again = [ask(kvpin, number) for number in range(8)]
        assert len({engine for engine, _ in served}) == 4
        assert [engine for engine, _ in again] == [engine for engine, _ in served]
        assert all(predicted > 0 for _, predicted in again)
        lines = wait_for(kvpin, "the engines tokenise")
        assert len(lines) <= MOST_LINES
        assert not any("retry" in line.lower() for line in lines)
        (line,) = [json.loads(line) for line in lines if "the engines tokenise" in line]
        assert "tokenizer=DIR" in line["detail"]


def ask(kvpin, number):
    """The engine that answered, and the tokens that were predicted to be reused there."""
    words = f"{number} " * 40
    body = {"model": "tiny", "messages": [{"role": "user", "content": words}], "max_tokens": 1}
    answer = kvpin.post("chat/completions", body).raise_for_status()
    return answer.headers["x-kvpin-engine"], int(answer.headers["x-kvpin-predicted-tokens"])


def wait_for(kvpin, text):
    """The log's lines, once one holds the text."""
    for _ in range(300):
        lines = kvpin.log.read_text().splitlines()
        if any(text in line for line in lines):
            return lines
        time.sleep(0.1)
    raise AssertionError(f"no {text!r} in {lines}")
