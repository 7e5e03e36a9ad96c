"""The own routes of llama-servers behind kvpin: followed like `/v1`, answered as the server answers."""

from __future__ import annotations

import json
import math
import re

import httpx
import pytest

from tests.live.llama_world import FILLS_IN, WAIT_S, llama_world
from tests.llama import running_llama_server

pytestmark = pytest.mark.live

STORY = "The ship left the harbour at dawn. " * 20
# What differs from one answer to the next of the same server.
VOLATILE = ("timings", "id_slot", "tokens_cached")
CONTEXT = 4096


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with llama_world(tmp_path_factory.mktemp("world")) as world:
        yield world


@pytest.fixture(scope="module")
def call(world):
    """Calls a route of kvpin, or with `server=True` of the server itself."""
    with httpx.Client(timeout=WAIT_S, trust_env=False) as client:

        def call(method, path, body=None, *, server=False, **options):
            base = world.servers[0].url if server else world.base_url.removesuffix("/v1")
            return client.request(method, base + path, json=body, **options)

        yield call


def ask(prompt, **fields):
    return {"prompt": prompt, "n_predict": 6, "temperature": 0, "seed": 1, **fields}


def foreseen(answer):
    """Reused tokens, which kvpin must have predicted."""
    reported = answer.json()["timings"]["cache_n"]
    assert int(answer.headers["x-kvpin-predicted-tokens"]) == reported
    assert int(answer.headers["x-kvpin-cached-tokens"]) == reported
    return reported


def events(answer):
    payloads = (line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: "))
    return [json.loads(payload) for payload in payloads]


def without(answer, *names):
    return {name: value for name, value in answer.items() if name not in (*VOLATILE, *names)}


def ids(call, text, **fields):
    return call("POST", "/tokenize", {"content": text, **fields}).json()["tokens"]


@pytest.mark.parametrize("path", ["/completion", "/completions"])
@pytest.mark.parametrize("form", ["text", "ids", "mixed", "list of one"])
def test_a_completion_is_placed_and_its_next_turn_found(world, call, path, form):
    text = f"{path} {form}. {STORY}"
    prompt = {
        "text": text,
        "ids": ids(call, text, add_special=True),
        "mixed": [*ids(call, text, add_special=True), " And then", " it sank"],
        "list of one": [text],
    }[form]
    first = call("POST", path, ask(prompt)).raise_for_status()
    world.until_idle()
    assert foreseen(first) < 8
    again = call("POST", path, ask(prompt)).raise_for_status()
    assert foreseen(again) == first.json()["tokens_evaluated"] - 1
    assert again.json()["content"] == first.json()["content"] != ""


@pytest.mark.parametrize("stream", [False, True])
def test_what_was_sampled_is_known_too(world, call, stream):
    """The server tells the ids it sampled: the next turn continues exactly behind the answer."""
    prompt = ids(call, f"What was sampled, {stream}. {STORY}", add_special=True)
    asked = ask(prompt, return_tokens=True, ignore_eos=True, stream=stream)
    answer = call("POST", "/completion", asked)
    sampled = [token for part in (events(answer) if stream else [answer.json()]) for token in part["tokens"]]
    assert len(sampled) == 6
    world.until_idle()
    more = [*prompt, *sampled, *ids(call, " The end of it.")]
    assert foreseen(call("POST", "/completion", ask(more))) == len(prompt) + 5


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stream": True},
        {"return_tokens": True},
        {"n_probs": 2},
        {"stop": [" a", " the"]},
        {"response_fields": ["content", "generation_settings/n_predict"]},
        {"n_indent": 2},
    ],
    ids=",".join,
)
def test_an_answer_is_the_servers_own(call, fields):
    asked = ask("The own answer. " + STORY, **fields)
    # The other must reuse as much: reused KV may round otherwise.
    call("POST", "/completion", asked).raise_for_status()
    ours, own = (call("POST", "/completion", asked, server=server) for server in (False, True))
    if fields.get("stream"):
        assert [without(event) for event in events(ours)] == [without(event) for event in events(own)]
    else:
        assert without(ours.json()) == without(own.json())


SEVERAL = ask(["Two ships. " + STORY, [*range(5, 305)]], n=2)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A server without kvpin. Requests for several that are sent past kvpin would take its slots."""
    with running_llama_server(tmp_path_factory.mktemp("alone") / "log") as server:
        yield lambda path, body: httpx.post(server.url + path, json=body, timeout=WAIT_S, trust_env=False)


def test_several_are_served_one_by_one_and_answered_as_the_server_does(world, call, alone):
    own = alone("/completion", SEVERAL).raise_for_status().json()
    for _ in range(2):
        answer = call("POST", "/completion", SEVERAL).raise_for_status()
        assert [without(each) for each in answer.json()] == [without(each) for each in own]
        assert "x-kvpin-note" not in answer.headers
        parts = [part_of(world, answer, number) for number in range(len(own))]
        assert [part["predicted_tokens"] for part in parts] == [part["reported_tokens"] for part in parts]
    assert all(part["reported_tokens"] == part["n_tokens"] - 1 for part in parts)


def part_of(world, answer, number):
    name = f"{answer.headers['x-request-id']}-{number}"
    return world.until(lambda: record_of(world, name), f"the record of {name}")


def record_of(world, name):
    answer = world.kvpin.admin("GET", f"requests/{name}")
    return answer.json() if answer.is_success else None


def test_several_as_a_stream(call, alone):
    asked = {**SEVERAL, "stream": True}
    ours, own = call("POST", "/completion", asked), alone("/completion", asked)
    assert ours.headers["content-type"] == own.headers["content-type"]
    for number in range(4):
        told = [[without(e) for e in events(each) if e and e["index"] == number] for each in (ours, own)]
        assert told[0] == told[1] != []


@pytest.mark.parametrize("more", [0, 1], ids=["refused by the server", "refused by kvpin"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_does_not_fit_has_the_servers_fields_and_openais_code(world, stream, more):
    """A prompt as long as the context leaves no room for an answer: only the server minds."""
    body = {"prompt": [5] * (CONTEXT + more), "max_tokens": 1, "stream": stream}
    answer = world.post("completions", body)
    assert answer.status_code == 400
    assert (
        answer.json()["error"].items()
        >= {
            "code": "context_length_exceeded",
            "type": "exceed_context_size_error",
            "n_prompt_tokens": CONTEXT + more,
            "n_ctx": CONTEXT,
        }.items()
    )


def test_an_error_is_the_servers(call):
    asked = ask([1] * 5000)
    ours, own = (call("POST", "/completion", asked, server=server) for server in (False, True))
    assert ours.status_code == own.status_code == 400
    assert ours.json() == own.json()


@pytest.mark.parametrize(
    "path", ["/props", "/lora-adapters", "/slots/0?action=erase", "/models/load", "/tools"]
)
def test_what_is_the_operators_cannot_be_reached(call, path):
    assert call("POST", path, {}).status_code == 404
    assert call("GET", "/cors-proxy?url=http://127.0.0.1/").status_code == 404


def test_no_tenant_sees_the_slots_of_all(tmp_path):
    keys = ("--api-key", "one", "--api-key", "two")
    debugging = {"LLAMA_SERVER_SLOTS_DEBUG": "1"}
    with llama_world(tmp_path, slots=2, kvpin_flags=keys, server_env=debugging) as world:
        base = world.base_url.removesuffix("/v1")

        def call(method, path, key, body=None):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            return httpx.request(
                method, base + path, json=body, headers=headers, timeout=WAIT_S, trust_env=False
            )

        asked = ask(f"A secret. {STORY}", stop=["harbinger"])
        for path in ("/completion", "/infill"):
            assert call("POST", path, None, asked).status_code == 401
        call("POST", "/completion", "one", asked).raise_for_status()
        assert "secret" in httpx.get(f"{world.servers[0].url}/slots", timeout=WAIT_S, trust_env=False).text
        for method in ("GET", "HEAD"):
            assert call(method, "/slots", None).status_code == 401
            assert call(method, "/slots", "two").status_code == 403


_SEVERAL = ({"n_cmpl": 2}, {"n": 2})
_SECRET = f"A secret. {STORY}"
_TALK = {"messages": [{"role": "user", "content": _SECRET}], "max_tokens": 4}
_ASKED = (
    ("/infill", {"input_prefix": _SECRET, "input_suffix": "", "prompt": "", "n_predict": 4}),
    ("/completion", {"prompt": _SECRET, "n_predict": 4}),
    ("/completion", {"prompt": [_SECRET, "Another one."], "n_predict": 4}),
    ("/v1/completions", {"prompt": _SECRET, "max_tokens": 4}),
    ("/v1/chat/completions", _TALK),
    ("/v1/messages", _TALK),
    ("/v1/responses", {"input": _SECRET, "max_output_tokens": 4}),
)
_OF_ONE_ANSWER = frozenset({"/v1/messages", "/v1/responses"})


@pytest.mark.parametrize("slots", [1, 3])
def test_a_text_that_is_filled_in_reuses_the_one_before(tmp_path, slots):
    """kvpin does not know the prompt that the server makes of it, nor its length: it goes by the text."""
    with llama_world(tmp_path, *FILLS_IN, slots=slots) as world:

        def reused(prefix, prompt):
            body = {"input_prefix": prefix, "input_suffix": "", "prompt": prompt, "n_predict": 4}
            path = f"{world.base_url.removesuffix('/v1')}/infill"
            answer = httpx.post(path, json=body, timeout=WAIT_S, trust_env=False).raise_for_status()
            return answer.json()["timings"]["cache_n"]

        assert reused(STORY, "") == 0
        assert reused(STORY, "then") > STORY.count(" ")
        if slots > 1:
            other = STORY[::-1]
            assert reused(other, "") < 8
            for prompt in ("and", "or"):  # each of two editors has a slot of its own
                assert reused(STORY, prompt) > STORY.count(" ")
                assert reused(other, prompt) > STORY.count(" ")


@pytest.mark.parametrize("flags", [(), ("--no-reuse",)], ids=["reuse", "no reuse"])
def test_several_texts_that_are_filled_in(tmp_path, flags):
    """Each on a slot that kvpin chooses; a list is no prompt here, and the server passes over it."""
    with llama_world(tmp_path, *FILLS_IN, slots=2, kvpin_flags=flags) as world:
        body = {"input_prefix": STORY, "input_suffix": "", "prompt": "", "n_predict": 4}
        path = f"{world.base_url.removesuffix('/v1')}/infill"
        answer = httpx.post(path, json=body | {"n": 3}, timeout=WAIT_S, trust_env=False).raise_for_status()
        assert [each["index"] for each in answer.json()] == [0, 1, 2]
        assert {each["id_slot"] for each in answer.json()} <= {0, 1}
        listed = httpx.post(path, json=body | {"prompt": ["a", "b"]}, timeout=WAIT_S, trust_env=False)
        assert listed.raise_for_status().json()["stop"]
        refused = httpx.post(path, json=body | {"n": 0}, timeout=WAIT_S, trust_env=False)
        assert refused.status_code == 400


@pytest.mark.parametrize("flags", [(), ("--no-reuse",)], ids=["reuse", "no reuse"])
def test_no_route_reuses_another_tenants_kv(tmp_path, flags):
    """Whatever slot a request runs on, also one that becomes several."""
    flags = ("--api-key", "one", "--api-key", "two", *flags)
    with llama_world(tmp_path, "--metrics", *FILLS_IN, slots=2, kvpin_flags=flags) as world:
        base = world.base_url.removesuffix("/v1")

        def computed(path, key, body):
            """The prompt tokens that the server computes for this."""
            before = _prompt_tokens(world.servers[0].url)
            headers = {"authorization": f"Bearer {key}"}
            answer = httpx.post(base + path, json=body, headers=headers, timeout=WAIT_S, trust_env=False)
            if path in _OF_ONE_ANSWER and {"n", "n_cmpl"} & body.keys() and answer.status_code == 400:
                return math.inf  # it is refused
            answer.raise_for_status()
            return _prompt_tokens(world.servers[0].url) - before

        for at, (path, body) in enumerate(_ASKED):
            for more in ({}, *_SEVERAL):
                once = f"A secret of {at} {next(iter(more), 'one')}."
                secret = json.loads(json.dumps(body | more).replace("A secret.", once))
                # Spaces in a text, each at least a token, are fewer than its tokens.
                for tenant in ("one", "two"):
                    assert computed(path, tenant, secret) > STORY.count(" "), (path, more, tenant)


def _prompt_tokens(url):
    """The prompt tokens that a server has computed, without those that it reused."""
    page = httpx.get(f"{url}/metrics", timeout=WAIT_S, trust_env=False).text
    (value,) = re.findall(r"^llamacpp:prompt_tokens_total (\S+)$", page, re.MULTILINE)
    return float(value)
