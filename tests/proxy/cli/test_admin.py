"""The commands against `kvpin serve` in front of a real engine."""

import json
import re
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from proxy.cli import admin

pytestmark = pytest.mark.live
KEY = ("--admin-key", "secret")


@pytest.fixture
def ask(kvpin, live_proxy):
    """Runs a command against the proxy and gives its JSON: `ask("stats")`."""

    def run(*words, status=0):
        result = kvpin(*words, "--url", live_proxy, *KEY, "--json")
        assert result.exit_code == status, result.output
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


@pytest.fixture
def story(tmp_path):
    """A chat nobody else has, as a file."""

    def write(name):
        text = f"Story {name}: " + " ".join(f"wave {n} came in." for n in range(40))
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps([{"role": "user", "content": text}]))
        return str(path)

    return write


def chat(url, path, **fields):
    messages = json.loads(Path(path).read_text())
    body = {"model": "kvpin-tiny", "messages": messages, "max_tokens": 1, "temperature": 0, **fields}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer


def cached(answer):
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def tier_blocks(ask):
    return ask("stats")["pools"][0]["engines"][0]["blocks"]


def until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_warmed_chat_is_found_by_the_data_plane(ask, show, live_proxy, story):
    path = story("warm")
    operation = ask("warm", "--messages-file", path)
    assert (operation["state"], operation["engines"][0]["engine"]) == ("done", "e0")
    route = ask("route", "--messages-file", path)
    blocks = operation["engines"][0]["done"]
    assert route["predicted_tokens"] == blocks * 16 > 0
    answer = chat(live_proxy, path)
    assert cached(answer) == blocks * 16
    assert int(answer.headers["x-kvpin-predicted-tokens"]) == blocks * 16
    assert "e0 is the only engine that can take the request" in show("route", "--messages-file", path)


def test_offload_and_restore_keep_what_was_computed(ask, live_proxy, story):
    path = story("tiers")
    first = chat(live_proxy, path)
    until(lambda: ask("route", "--messages-file", path)["predicted_tokens"])
    predicted = ask("route", "--messages-file", path)["predicted_tokens"]
    moved = ask("offload", "--messages-file", path)["engines"][0]
    assert moved["state"] == "done"
    # The question's last block may be full only with the generation prompt, which is no part of the target.
    assert predicted - moved["done"] * 16 in (0, 16)
    assert moved["bytes"] > 0
    until(lambda: ask("route", "--messages-file", path)["candidates"][0]["matched_tokens"]["host"])
    assert tier_blocks(ask)["host"] >= moved["done"]
    restored = ask("restore", "--messages-file", path)["engines"][0]
    assert restored["done"] == moved["done"]
    second = chat(live_proxy, path)
    assert cached(second) == predicted
    assert second.json()["choices"][0]["message"] == first.json()["choices"][0]["message"]


def test_a_flush_is_seen_at_once(ask, live_proxy, story):
    path, other = story("flushed"), story("kept")
    for name in (path, other):
        chat(live_proxy, name)
    until(lambda: ask("route", "--messages-file", other)["predicted_tokens"])
    assert ask("flush", "--messages-file", path)["engines"][0]["done"] > 0
    assert ask("route", "--messages-file", path)["predicted_tokens"] < 32
    assert cached(chat(live_proxy, path)) < 32
    assert cached(chat(live_proxy, other)) > 32


def test_a_pinned_prefix_stays_until_it_is_unpinned(ask, show, live_proxy, story):
    path = story("pinned")
    chat(live_proxy, path, prompt_cache_key="the-pinned-one")
    until(lambda: ask("route", "--messages-file", path)["predicted_tokens"])
    pinned = ask("pin", "--prompt-cache-key", "the-pinned-one", "--ttl", "60")
    pin_id = pinned["result"]["pin_id"]
    assert pin_id in show("stats")
    left = ask("offload", "--prompt-cache-key", "the-pinned-one")["engines"][0]
    assert (left["done"], left["left"]["pinned"]) == (0, pinned["result"]["blocks"])
    assert "unpinned: True" in show("unpin", pin_id)
    assert ask("offload", "--messages-file", path)["engines"][0]["done"] > 0


def test_why_a_request_missed(ask, show, live_proxy, story):
    chat(live_proxy, story("why"), user="x")
    last = ask("requests", "--limit", "1")["requests"][0]
    explained = ask("requests", last["request_id"])
    assert explained["reported_tokens"] == explained["predicted_tokens"]
    said = explained["explanation"].split("; ")[0]
    assert said.startswith("e0 reused ")
    assert said.endswith(", as predicted")
    output = show("requests", last["request_id"])
    assert explained["explanation"] in " ".join(output.split())
    assert last["request_id"] in show("requests")


def test_token_ids_and_text(ask, kvpin, live_proxy):
    for verb in ("flush", "pin"):
        result = kvpin(verb, "--token-ids", "1,2,3", "--url", live_proxy, *KEY)
        assert result.exit_code == 1
        assert "caches keep full blocks of 16 tokens, and the prefix has only 3" in result.stderr
    result = kvpin("pin", "--prompt", "never pinned " * 40, "--url", live_proxy, *KEY)
    assert (result.exit_code, "warm it first" in result.stderr) == (1, True)
    assert ask("flush", "--prompt", "never seen " * 40)["note"] == "no engine holds any of it"


def test_tables_for_people(show):
    assert "kvpin-tiny" in show("engines")
    assert show("engines", "list") == show("engines")
    assert "1 of 1 engines ready" in show("stats")


def test_a_drain_is_undone(kvpin, live_proxy, ask, show):
    drained = kvpin("engines", "drain", "e0", "--url", live_proxy, *KEY)
    state, hint = drained.stdout.splitlines()
    assert state.startswith("e0 is draining, ")
    assert hint == "add --wait to wait for its last request, --undo to let it take requests again"
    assert drained.stderr == (
        "warning: no engine takes requests for kvpin-tiny now: they get 503 no_engine; "
        "kvpin engines drain e0 --undo ends that\n"
    )
    undone = show("engines", "drain", "e0", "--undo")
    assert undone.startswith("e0 takes requests again after a health check, ")
    until_ready(ask)
    assert show("engines", "drain", "e0", "--undo").startswith("e0 is ready, ")


def until_ready(ask):
    deadline = time.monotonic() + 10
    while ask("engines")["engines"][0]["state"] != "ready":
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_engines_come_and_go(kvpin, ask, show, live_proxy):
    added = show("engines", "add", "vllm=http://127.0.0.1:1,id=gone,dp_rank=0")
    assert added.startswith("added gone, not connected yet: `kvpin engines` says ")
    assert show("engines", "drain", "gone", "--wait") == (
        "gone is draining, 0 requests in flight\ngone is drained, after 0.0 s: no request is in flight\n"
    )
    both = kvpin("engines", "drain", "gone", "--undo", "--wait", "--url", live_proxy, *KEY)
    assert (both.exit_code, "leave out --undo or --wait" in both.stderr) == (1, True)
    assert [engine["state"] for engine in ask("engines")["engines"]] == ["ready", "draining"]
    assert show("engines", "remove", "gone") == "removed gone\n"
    wrong = ("nonsense", "vllm=http://x,id", "vllm=http://x,dprank=0", "vllm=http://x,dp_rank=first")
    for words in (("remove", "gone"), *(("add", text) for text in wrong)):
        result = kvpin("engines", *words, "--url", live_proxy, *KEY)
        assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    started = kvpin("engines", "add", "embedded: --kv-blocks 9", "--url", live_proxy, *KEY)
    assert "write KIND=URL" in started.stderr
    assert "command line" not in started.stderr


def test_a_drain_that_is_waited_for_says_when_it_is_over(capsys, monkeypatch):
    class Asked:
        """A kvpin whose engine has two requests, of which one ends between two looks."""

        left = 2

        def post(self, path, body):
            assert (path, body) == ("/engines/e0/drain", {"undo": False})
            return {"state": "draining", "in_flight": self.left, "warning": None}

        def get(self, path):
            self.left -= 1
            return {"engines": [{"id": "e0", "in_flight": self.left}]}

    monkeypatch.setattr(admin, "_POLL_S", 0.2)
    admin.engines_drain(engine_id="e0", wait=True, kvpin=Asked())
    first, last = capsys.readouterr().out.splitlines()
    assert first == "e0 is draining, 2 requests in flight"
    assert re.fullmatch(r"e0 is drained, after 0\.[2-9] s: no request is in flight", last)


def test_the_address_and_key_come_from_the_environment(kvpin, live_proxy):
    env = {"KVPIN_URL": live_proxy, "KVPIN_ADMIN_KEY": "secret"}
    assert kvpin("stats", env=env).exit_code == 0
    result = kvpin("stats", env={"KVPIN_URL": live_proxy})
    assert result.exit_code == 1
    assert result.stderr == (
        "kvpin: the admin key is missing or wrong: use --admin-key, KVPIN_ADMIN_KEY or "
        "KVPIN_ADMIN_KEY_FILE (401)\n"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("flush",), "name a target: use one of --messages-file, "),
        (("flush", "--engine", "z"), "there is no engine 'z'"),
        (("warm", "--engine", "z"), "this command needs a prefix"),
        (("pin", "--prompt", "x", "--ttl", "0"), "--ttl: must be a number above 0"),
        (("unpin", "pin-x"), "there is no pin 'pin-x'"),
        (("requests", "req-x"), "no recent request has the id 'req-x'"),
    ],
)
def test_what_is_wrong_is_one_line_and_status_1(kvpin, live_proxy, words, said):
    result = kvpin(*words, "--url", live_proxy, *KEY)
    assert result.exit_code == 1
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert not re.search(r"\w_\w", result.stderr)  # no field of the admin API


HIDDEN, VOCABULARY = 256, 4096


@pytest.fixture
def tables(kvpin, live_proxy):
    """Runs a command on prompt tables: `tables("list")`."""
    return lambda *words: kvpin("tables", *words, "--url", live_proxy, "--admin-key", "secret")


@pytest.fixture
def table_file(tmp_path):
    path = tmp_path / "table.safetensors"
    save_file({"t": np.random.default_rng(5).normal(0, 0.02, (16, HIDDEN)).astype(np.float32)}, path)
    return str(path)


def test_a_table_from_put_to_delete(tables, table_file, live_proxy):
    put = tables("put", table_file, "--id", "mine", "--extra-id", "77")
    assert (put.exit_code, put.stdout) == (0, "registered mine: 16 rows of 256 values\n")
    listed = json.loads(tables("list", "--json").stdout)["prompt_tables"]
    mine = next(table for table in listed if table["table_id"] == "mine")
    assert (mine["extra_id"], mine["rows"], mine["hidden"]) == (77, 16, HIDDEN)
    assert json.loads(tables("show", "mine", "--json").stdout) == mine
    assert '"prompt_table": "mine"' in tables("show", "mine").stdout
    ids = [*range(VOCABULARY, VOCABULARY + 16), 100, 101]
    body = {"model": "kvpin-tiny", "prompt": ids, "max_tokens": 1, "prompt_table": "mine"}
    answer = httpx.post(f"{live_proxy}/v1/completions", json=body, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    assert tables("delete", "mine").stdout == "deleted mine\n"
    assert "mine" not in tables().stdout


def test_the_name_comes_from_the_content(tables, table_file):
    table = json.loads(tables("put", table_file, "--json").stdout)
    assert table["table_id"] == f"pt-{table['extra_id']:016x}"
    assert f" {table['extra_id']}" in tables("list").stdout
    assert tables("delete", table["table_id"]).exit_code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("put", "gone.safetensors"), "'gone.safetensors' cannot be read: No such file or directory"),
        (("put", __file__), "safetensors"),
        (("show", "nobody"), "there is no prompt table 'nobody'"),
        (("delete", "nobody"), "nobody"),
        (("delete", "../engines/e0"), "(404)"),
    ],
)
def test_bad_input_is_one_sentence(tables, words, said):
    result = tables(*words)
    assert (result.exit_code, result.stdout) == (1, "")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("kvpin: ")


def test_bad_ids(tables, table_file):
    assert "--extra-id must be an integer" in tables("put", table_file, "--extra-id", "0").stderr
    assert "--id must be 1 to 128 letters" in tables("put", table_file, "--id", "a b").stderr


@pytest.mark.parametrize("group", ["tables", "engines"])
def test_an_address_before_the_command_is_not_lost(kvpin, group, live_proxy):
    result = kvpin(group, "--url", live_proxy, "list" if group == "tables" else "drain", "e0")
    assert (result.exit_code, result.stderr) == (
        1,
        f"kvpin: write --url after {'list' if group == 'tables' else 'drain'}\n",
    )
