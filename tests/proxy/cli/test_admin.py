"""The commands that use the admin API: what they ask of it, and what they print of a real kvpin's answers."""

import json
import re
import time

import httpx
import pytest

from proxy.cli import admin as admin_module
from tests.proxy.cli.test_client import admin

KEY = ("--admin-key", "secret")
# What the fake kvpin answers to everything.
ANSWER = {
    "id": "x", "verb": "v", "state": "done", "engines": [], "error": None, "in_flight": 0,
    "warning": "beware", "key": "kvp-1", "tenant": "t", "notes": ["the first"], "keys": [{}],
}  # fmt: skip
ASKED = {
    "flush --all": ("/flush", {"all": True}),
    "offload --engine e": ("/offload", {"engine": "e"}),
    "restore --prompt x --or-warm": ("/restore", {"prompt": "x", "fallback": "warm"}),
    "restore --prompt x": ("/restore", {"prompt": "x"}),
    "warm --token-ids 1,2 --all-engines": ("/warm", {"token_ids": [1, 2], "engines": "all"}),
    "warm --prompt x --engine e": ("/warm", {"prompt": "x", "engine": "e"}),
    "pin --prompt-cache-key k --ttl 5": ("/pin", {"prompt_cache_key": "k", "ttl_s": 5.0}),
    "unpin p": ("/unpin", {"pin_id": "p"}),
    "route --token-ids 1,2 --tenant t": ("/route", {"prompt": [1, 2], "tenant": "t"}),
    "requests r/1": ("/requests/r%2F1", None),
    "requests --limit 3": ("/requests?limit=3", None),
    "usage --days 3": ("/usage?days=3", None),
    "stats": ("/stats", None),
    "engines": ("/engines", None),
    "tables list": ("/prompt_tables", None),
    "keys list": ("/keys", None),
}
ORDERED = {
    "engines add nim=http://g,id=a": ("POST", "/engines", {"kind": "nim", "url": "http://g", "id": "a"}),
    "engines drain a": ("POST", "/engines/a/drain", {"undo": False}),
    "engines drain a --undo": ("POST", "/engines/a/drain", {"undo": True}),
    "engines remove ../a": ("DELETE", "/engines/..%2Fa", None),
    "keys remove k": ("DELETE", "/keys/k", None),
}


@pytest.mark.parametrize(("words", "asked"), ASKED.items(), ids=ASKED)
def test_what_a_command_asks_of_kvpin(kvpin, words, asked):
    with admin(lambda *_: (200, ANSWER)) as (url, seen):
        result = kvpin(*words.split(), "--url", url, *KEY, "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (0, ANSWER), result.output
    ((_, path, sent, key),) = seen
    body = json.loads(sent) if sent else None
    assert body is None or body.pop("wait_s", 0.1) == 0.1
    assert ((path, body), key) == ((f"/admin/v1{asked[0]}", asked[1]), "Bearer secret")


@pytest.mark.parametrize(("words", "ordered"), ORDERED.items(), ids=ORDERED)
def test_what_a_command_orders_and_the_warning_of_the_answer(kvpin, words, ordered):
    with admin(lambda *_: (200, ANSWER)) as (url, seen):
        result = kvpin(*words.split(), "--url", url)
    assert (result.exit_code, "warning: beware\n" in result.stderr) == (0, True), result.output
    method, path, body = ordered
    assert seen[0][:2] == (method, f"/admin/v1{path}")
    assert (json.loads(seen[0][2]) if seen[0][2] else None) == body


def test_a_new_key_is_printed_alone(kvpin):
    with admin(lambda *_: (201, ANSWER)) as (url, seen):
        result = kvpin("keys", "add", "--tenant", "t", "--model", "m", "--name", "n", "--url", url, *KEY)
    assert (result.exit_code, result.stdout) == (0, "kvp-1\n")
    assert result.stderr.endswith("kvpin does not show it again\nnote: the first\n")
    sent = json.loads(seen[0][2])
    assert {name: value for name, value in sent.items() if value} == {
        "tenant": "t",
        "models": ["m"],
        "name": "n",
    }


def test_a_drain_that_is_waited_for_says_when_it_is_over(kvpin, monkeypatch):
    monkeypatch.setattr(admin_module, "_POLL_S", 0.01)
    left = iter([2, 1, 0])

    def script(_method, _path, _body):
        in_flight = next(left)
        return 200, ANSWER | {"in_flight": in_flight, "engines": [{"id": "e0", "in_flight": in_flight}]}

    with admin(script) as (url, _):
        result = kvpin("engines", "drain", "e0", "--wait", "--url", url)
    first, last = result.stdout.splitlines()
    assert first.endswith(", 2 requests in flight")
    assert re.fullmatch(r"e0 is drained, after \d+\.\d s: no request is in flight", last)
    assert next(left, None) is None


@pytest.fixture
def ask(kvpin, live_proxy):
    """Runs a command against a real kvpin and gives its JSON: `ask("stats")`."""

    def run(*words):
        result = kvpin(*words, "--url", live_proxy, *KEY, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    return run


@pytest.fixture
def show(kvpin, live_proxy):
    """Runs a command as a person would and gives what it prints."""

    def run(*words):
        result = kvpin(*words, "--url", live_proxy, *KEY)
        assert result.exit_code == 0, result.output
        return result.stdout

    return run


def test_a_warmed_chat_is_found_pinned_and_explained(ask, show, live_proxy, tmp_path):
    messages = [{"role": "user", "content": " ".join(f"wave {n} came in." for n in range(40))}]
    path = tmp_path / "chat.json"
    path.write_text(json.dumps(messages))
    blocks = ask("warm", "--messages-file", str(path))["engines"][0]["done"]
    assert ask("route", "--messages-file", str(path))["predicted_tokens"] == blocks * 16 > 0
    assert "e0 is the only engine that can take the request" in show("route", "--messages-file", str(path))
    body = {"model": "kvpin-tiny", "messages": messages, "max_tokens": 1, "prompt_cache_key": "mine"}
    answer = httpx.post(f"{live_proxy}/v1/chat/completions", json=body, timeout=60, trust_env=False)
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == blocks * 16
    last = ask("requests", "--limit", "1")["requests"][0]
    explained = ask("requests", last["request_id"])
    assert explained["explanation"].startswith("e0 reused ")
    assert explained["explanation"] in " ".join(show("requests", last["request_id"]).split())
    assert last["request_id"] in show("requests")
    pin_id = ask("pin", "--prompt-cache-key", "mine", "--ttl", "60")["result"]["pin_id"]
    assert pin_id in show("stats")
    assert "unpinned: True" in show("unpin", pin_id)
    assert "1 of 1 engines ready" in show("stats")


def test_a_drain_is_undone(kvpin, live_proxy, ask, show):
    drained = kvpin("engines", "drain", "e0", "--url", live_proxy, *KEY)
    state, hint = drained.stdout.splitlines()
    assert state.startswith("e0 is draining, ")
    assert hint == "add --wait to wait for its last request, --undo to let it take requests again"
    assert "kvpin engines drain e0 --undo ends that" in drained.stderr
    assert show("engines", "drain", "e0", "--undo").startswith(
        "e0 takes requests again after a health check, "
    )
    deadline = time.monotonic() + 10
    while ask("engines")["engines"][0]["state"] != "ready":
        assert time.monotonic() < deadline
        time.sleep(0.05)
