"""`kvpin serve --engine 'llama-server: …'`: started, watched, restarted, and nothing lost with it."""

from __future__ import annotations

import os
import signal

import httpx
import pytest

from scripts.make_gguf import gguf_path
from tests.live.answers import until
from tests.live.conftest import running_kvpin
from tests.llama import llama_server, memory_dir

WAIT_S = 60.0
STORY = "Once upon a time there was a server with four slots and sixteen conversations. " * 8


@pytest.fixture
def serve(monkeypatch, tmp_path):
    """Starts kvpin with a llama-server of its own: `serve()`; all share one host cache."""
    monkeypatch.setenv("LLAMA_SERVER", llama_server())
    count = iter(range(9))

    def start(directory):
        command = f"-m {gguf_path('tiny')} -np 2 -c 4096 -t 1 --slot-save-path {directory}"
        return running_kvpin(tmp_path / f"kvpin-{next(count)}.log", "--engine", f"llama-server: {command}")

    return start


def ask(kvpin, text) -> tuple[str, int, int] | None:
    """(text, cached tokens predicted, cached tokens reported) of a greedy answer; None while there is no
    server, which is a clear error."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0}
    response = httpx.post(f"{kvpin.base_url}/chat/completions", json=body, timeout=WAIT_S, trust_env=False)
    answer = response.json()
    if response.status_code in (502, 503):
        assert answer["error"]["message"]
        return None
    assert response.status_code == 200, answer
    return (
        answer["choices"][0]["message"]["content"],
        int(response.headers["x-kvpin-predicted-tokens"]),
        answer["usage"]["prompt_tokens_details"]["cached_tokens"],
    )


def test_conversations_outlive_kvpin_and_a_crash_of_its_server(serve):
    texts = [f"{name}: {STORY}" for name in ("Ada", "Ben", "Cyd")]
    with memory_dir() as directory:
        with serve(directory) as kvpin:
            first = [ask(kvpin, text)[0] for text in texts]
            (engine,) = kvpin.engines().values()
            assert engine["findings"] == []
            assert len(engine["kv"]["slots"]) == 2
        with serve(directory) as kvpin:
            for text, before in zip(texts, first, strict=True):
                answer, predicted, reported = ask(kvpin, text)
                assert answer == before
                assert predicted == reported > 100
            kvpin.admin("POST", "offload", json={"all": True}).raise_for_status()
            (engine,) = kvpin.engines().values()
            os.kill(engine["process"]["pid"], signal.SIGKILL)
            answer, predicted, reported = until(lambda: ask(kvpin, texts[0]), "an answer")
            assert answer == first[0]
            assert predicted == reported > 100
