"""Several `kvpin serve` in front of one llama-server, which takes only one."""

import json
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.live.answers import text_of, until, user
from tests.live.conftest import running_kvpin, starting_kvpin, wait_until_ready
from tests.live.llama_world import MODEL
from tests.llama import memory_dir, running_llama_server
from tests.valkey import Valkey

pytestmark = pytest.mark.live

WAIT_S = 60.0
# Long enough that saving a slot pays.
STORY = "Tell me a story about slots. " * 120


@pytest.fixture
def server(tmp_path):
    """A llama-server with two slots, and what a kvpin is told of it."""
    with (
        memory_dir() as directory,
        running_llama_server(tmp_path / "llama.log", slots=2, save_dir=directory) as server,
    ):
        flag = f"--engine=llama_server={server.url},id=llama,model={MODEL},host_cache_dir={directory}"
        yield server, flag


@pytest.fixture
def start(tmp_path):
    """Starts kvpins; ends them."""
    with ExitStack() as stack:
        yield lambda run, name, *flags: stack.enter_context(run(tmp_path / f"{name}.log", *flags))


def ask(kvpin, text, **fields):
    """(text, cached tokens) of a greedy chat."""
    body = {"model": MODEL, "messages": user(text), "max_tokens": 4, "temperature": 0, **fields}
    answer = kvpin.post("chat/completions", body).raise_for_status()
    return text_of(answer), answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def until_saved(flag):
    """After kill -9, a kvpin knows what files hold by their sidecars. They are written in idle time."""
    directory = Path(flag.rpartition("=")[2])
    until(lambda: [*directory.glob("kvpin-*.json")])


def health(kvpin):
    return httpx.get(f"{kvpin.url}/health/ready", trust_env=False)


def engine_of(kvpin):
    (engine,) = kvpin.admin("GET", "engines").json()["engines"]
    return engine


def test_one_that_was_started_by_mistake_says_who_has_it_and_waits_until_it_is_free(server, start):
    _, flag = server
    first = start(running_kvpin, "first", flag)
    said = ask(first, STORY)[0]
    second = start(starting_kvpin, "second", flag)
    reason = f"another kvpin uses it (process {first.process.pid} on"
    until(lambda: reason in second.log.read_text())
    assert engine_of(second)["state"] == "elsewhere"
    assert engine_of(second)["owner"].startswith(f"process {first.process.pid} on")
    # The system chose the port: the process stands for it.
    assert engine_of(first)["owner"] == f"{socket.gethostname()}:{first.process.pid}"
    answer = health(second)
    assert answer.status_code == 503
    assert reason in answer.text
    assert "kvpin_engine_owner" in httpx.get(f"{second.url}/metrics", trust_env=False).text
    until_saved(flag)
    first.kill()
    until(lambda: health(second).status_code == 200)
    text, cached = ask(second, STORY)
    assert text == said
    assert cached > 100


def test_with_an_exchange_one_owns_the_server_and_both_answer_as_one(server, start, tmp_path):
    llama, flag = server
    exchange = f"--exchange=unix:{tmp_path / 'bus'}"
    first = start(running_kvpin, "first", flag, exchange)
    second = start(starting_kvpin, "second", flag, exchange)
    wait_until_ready(second)
    assert engine_of(second)["state"] == "elsewhere"
    assert engine_of(second)["owner"] == engine_of(first)["owner"]

    said, _ = ask(first, STORY)
    text, cached = ask(second, STORY)
    assert text == said
    assert cached > 100
    body = {"model": MODEL, "prompt": STORY, "max_tokens": 6, "temperature": 0}
    whole = completion(first, body)["choices"][0]["text"]
    assert whole == completion(second, body)["choices"][0]["text"]
    streamed = b"".join(stream(second, body | {"stream": True}))
    assert streamed.endswith(b"data: [DONE]\n\n")
    parts = [json.loads(line[6:]) for line in streamed.split(b"\n\n") if line.startswith(b"data: {")]
    assert "".join(part["choices"][0]["text"] for part in parts if part["choices"]) == whole
    for path in ("models", f"models/{MODEL}"):
        answers = [httpx.get(f"{each.base_url}/{path}", trust_env=False).json() for each in (first, second)]
        assert answers[0] == answers[1]
    assert "owner" in httpx.get(f"{second.url}/metrics", trust_env=False).text
    unknown = httpx.post(f"{second.base_url}/completions", content=b"{", trust_env=False)
    assert unknown.status_code == 400

    until_saved(flag)
    leaving = stream(second, body | {"stream": True, "max_tokens": 3000})
    next(leaving)
    assert running(first) == 1
    leaving.close()
    until(lambda: running(first) == 0)

    with ThreadPoolExecutor() as threads:
        asked = threads.submit(completion, second, body | {"max_tokens": 1000})
        until(lambda: running(first) == 1)
        first.kill()
        assert asked.result()["choices"][0]["text"].startswith(whole)
    until(lambda: engine_of(second)["state"] == "ready")
    text, cached = ask(second, STORY)
    assert text == said
    assert cached > 100
    third = start(running_kvpin, "third", flag, exchange)
    assert ask(third, STORY) == (text, cached)
    assert all("damaged" not in each.log.read_text() for each in (first, second, third))
    assert llama.process.poll() is None


def test_a_request_at_an_owner_that_hangs_is_a_503_and_the_server_is_free_once_it_is_killed(
    server, start, tmp_path
):
    _, flag = server
    exchange = f"--exchange=unix:{tmp_path / 'bus'}"
    first = start(running_kvpin, "first", flag, exchange)
    second = start(starting_kvpin, "second", flag, exchange)
    wait_until_ready(second)
    body = {"model": MODEL, "prompt": "Tell me a story. ", "max_tokens": 2000, "ignore_eos": True}
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(second.post, "completions", body)
        until(lambda: running(first) == 1)
        first.process.send_signal(signal.SIGSTOP)
        answer = asked.result()
    assert answer.status_code == 503
    assert "another one does" in answer.json()["error"]["message"]
    assert engine_of(second)["state"] == "elsewhere"
    first.kill()
    until(lambda: engine_of(second)["state"] == "ready")
    assert completion(second, body | {"max_tokens": 4})["choices"][0]["text"]


def test_workers_that_share_redis_pass_requests_on_to_the_one_that_owns_the_server(server, start):
    _, flag = server
    valkey = Valkey()
    try:
        kvpin = start(running_kvpin, "workers", flag, "--workers=2", f"--exchange={valkey.url}")
        body = {"model": MODEL, "prompt": "Tell me a story. ", "max_tokens": 4}

        def passed_on():
            completion(kvpin, body)  # each on a connection of its own
            return sum(kvpin.admin("GET", "stats").json()["passed_on"].values())

        until(passed_on)
    finally:
        valkey.kill()


def completion(kvpin, body):
    return kvpin.post("completions", body).raise_for_status().json()


def stream(kvpin, body):
    url = f"{kvpin.base_url}/completions"
    with httpx.stream("POST", url, json=body, timeout=WAIT_S, trust_env=False) as answer:
        yield from answer.iter_bytes()


def running(kvpin):
    return engine_of(kvpin)["in_flight"]
