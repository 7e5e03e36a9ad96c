"""Several choices and several prompts in one request, on real engines: each part foreseen, answers joined."""

from __future__ import annotations

import json
import threading
import time

import httpx
import pytest

from tests.live.llama_world import MODEL, llama_world

pytestmark = pytest.mark.live


def story(name, sentences=40):
    return f"{name} tells a story. " + " ".join(f"The ship came to harbour {n}." for n in range(sentences))


class Place:
    """A kvpin before engines of one kind."""

    def __init__(self, kvpin, model, settle):
        self.kvpin, self.model, self.settle = kvpin, model, settle

    def post(self, path, **fields):
        body = {"model": self.model, "max_tokens": 6, "temperature": 0, **fields}
        answer = self.kvpin.post(path, body)
        self.settle()
        return answer

    def parts(self, answer):
        """The records of an answer's parts, in order."""
        own = answer.headers["x-request-id"]
        found = self.kvpin.admin("GET", "requests", params={"limit": 3000}).json()["requests"]
        parts = {r["request_id"].removeprefix(f"{own}-"): r for r in found if own in r["request_id"]}
        parts.pop("prompt", None)  # computed once for all
        return [parts[str(number)] for number in range(len(parts))]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    with llama_world(tmp_path_factory.mktemp("several")) as world:
        yield Place(world.kvpin, MODEL, world.until_idle)


@pytest.fixture(params=["embedded", "llama"])
def place(request):
    if request.param == "llama":
        return request.getfixturevalue("llama")
    return Place(request.getfixturevalue("kvpin"), "kvpin-tiny", lambda: None)


def cached(usage):
    return usage["prompt_tokens_details"]["cached_tokens"]


def events_of(answer):
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


def text_of(choice):
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.mark.parametrize("stream", [False, True])
def test_choices_are_foreseen_and_the_second_request_hits(place, stream):
    text = story(f"Choices {stream}")
    fields = {"messages": [{"role": "user", "content": text}], "n": 3, "stream": stream}
    if stream:
        fields["stream_options"] = {"include_usage": True}
    first, again = place.post("chat/completions", **fields), place.post("chat/completions", **fields)
    for answer in (first, again):
        assert answer.status_code == 200, answer.text
        parts = place.parts(answer)
        assert len(parts) == 3
        assert [part["predicted_tokens"] for part in parts] == [part["reported_tokens"] for part in parts]
        if not stream:
            made = answer.json()
            usage = made["usage"]
            assert [choice["index"] for choice in made["choices"]] == [0, 1, 2]
            assert len({text_of(choice) for choice in made["choices"]}) == 1  # temperature 0
        else:
            *events, last = events_of(answer)
            usage = last["usage"]
            assert {choice["index"] for event in events for choice in event["choices"]} == {0, 1, 2}
            assert len({event["id"] for event in events}) == 1
            assert answer.text.count("[DONE]") == 1
        assert usage["completion_tokens"] == sum(part["output_tokens"] for part in parts)
        assert usage["prompt_tokens"] == parts[0]["n_tokens"] > 400
        assert cached(usage) < 100 if answer is first else cached(usage) == parts[0]["reported_tokens"]
    # On a busy machine, computing so short a prompt in a free slot may be expected to take less than a wait.
    assert any(part["reported_tokens"] > part["n_tokens"] - 32 for part in place.parts(again))


def test_a_llama_server_computes_a_prompt_once_for_all_choices(llama):
    answer = llama.post("chat/completions", messages=[{"role": "user", "content": story("Once", 100)}], n=4)
    parts = llama.parts(answer)
    assert all(part["reported_tokens"] == part["n_tokens"] - 1 > 1000 for part in parts)
    assert cached(answer.json()["usage"]) < 100  # as if one choice had been asked for


def test_prompts_are_foreseen_each_by_itself(place):
    prompts = [story(name, 20) for name in ("One", "Two", "Three")]
    singles = [text_of(place.post("completions", prompt=prompt).json()["choices"][0]) for prompt in prompts]
    answer = place.post("completions", prompt=prompts, n=2)
    made, parts = answer.json(), place.parts(answer)
    assert [choice["index"] for choice in made["choices"]] == list(range(6))
    assert [text_of(choice) for choice in made["choices"]] == [text for text in singles for _ in range(2)]
    assert [part["predicted_tokens"] for part in parts] == [part["reported_tokens"] for part in parts]
    for one, other in zip(parts[::2], parts[1::2], strict=True):  # a free slot may take one of them sooner
        assert max(one["reported_tokens"], other["reported_tokens"]) > one["n_tokens"] - 32
    assert made["usage"]["prompt_tokens"] == sum(part["n_tokens"] for part in parts[::2])
    assert cached(made["usage"]) == sum(part["reported_tokens"] for part in parts[::2])


def test_seeds_make_choices_that_differ_and_repeat(place):
    # Short: what else a step of llama-server computes changes its numbers, and now and then a token.
    fields = {"prompt": story("Seeds", 5), "temperature": 1.0, "max_tokens": 4}
    several = place.post("completions", **fields, seed=11, n=3).json()["choices"]
    texts = [text_of(choice) for choice in several]
    assert len(set(texts)) == 3
    singles = [
        text_of(place.post("completions", **fields, seed=seed).json()["choices"][0]) for seed in (11, 12, 13)
    ]
    assert texts == singles


def test_a_llama_server_serves_others_meanwhile(llama):
    """Before kvpin split them, such a request waited for all slots, and all others waited for it."""
    answers = []

    def ask(path, **fields):
        answers.append((path, llama.post(path, **fields), time.monotonic()))

    fields = {
        "messages": [{"role": "user", "content": "Go on."}],
        "n": 2,
        "max_tokens": 1800,
        "ignore_eos": True,
    }
    long = threading.Thread(target=ask, args=("chat/completions",), kwargs=fields)
    long.start()
    deadline = time.monotonic() + 60
    while sum(slot["operation"] == "request" for slot in llama.kvpin.engines()["llama-0"]["kv"]["slots"]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 1}
    answer = httpx.post(f"{llama.kvpin.base_url}/completions", json=body, timeout=60, trust_env=False)
    assert answer.status_code == 200
    assert long.is_alive()
    long.join()
    assert answers[0][1].json()["usage"]["completion_tokens"] == 3600
