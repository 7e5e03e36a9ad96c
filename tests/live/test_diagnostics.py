"""Ways to miss the cache, on real engines: each is named rightly in `kvpin requests`, with what differs."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.fake_engines.sglang import running_sglang
from tests.fake_engines.vllm import running_vllm
from tests.live.conftest import Kvpin, running_kvpin
from tests.live.llama_world import llama_world
from tests.live.sglang_world import kvpin_over as over_sglang
from tests.live.test_media import kvpin_over as over_vllm

pytestmark = pytest.mark.live

RED, BLUE = "key-of-red", "key-of-blue"
KEYS = ("--api-key", RED, "--api-key", BLUE)
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": f"Looks up {name}.", "parameters": {"type": "object"}},
    }
    for name in ("weather", "trains", "shops")
]


def rules(name: str) -> str:
    return f"Of {name}, answer in one sentence and never guess. " * 8


@dataclass
class Place:
    """A kvpin, and the models that it serves."""

    kvpin: Kvpin
    model: str
    other_model: str
    empty: Callable[[], None]
    emptied: str

    def ask(self, messages: list[dict[str, Any]], key: str = RED, **fields: Any) -> dict[str, Any]:
        """What `kvpin requests ID` shows of a chat."""
        body = {"model": self.model, "messages": messages, "max_tokens": 4, "temperature": 0, **fields}
        return self.kvpin.record_of(self.post("chat/completions", body, key))

    def post(self, path: str, body: dict[str, Any], key: str) -> httpx.Response:
        return self.kvpin.post(path, body, headers={"authorization": f"Bearer {key}"})


def flush(kvpin: Kvpin) -> None:
    operation = kvpin.admin("POST", "flush", json={"all": True}).raise_for_status().json()
    assert operation["state"] == "done", operation


@pytest.fixture(scope="module", params=["embedded", "llama"])
def place(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("diagnostics")
    if request.param == "embedded":
        engine = "embedded: --threads 1 --kv-blocks 96"
        other = f"{engine} --served-model-name other"
        with running_kvpin(path / "log", "--managed", engine, "--managed", other, *KEYS) as kvpin:
            yield Place(kvpin, "kvpin-tiny", "other", lambda: flush(kvpin), "flushed")
    else:
        with llama_world(
            path, servers=2, models=("tiny", "other"), host_cache=False, kvpin_flags=KEYS
        ) as world:

            def restart() -> None:
                world.restart(0)
                known = '"engine": "llama-0", "model": "tiny"'
                world.until(
                    lambda: world.kvpin.log.read_text().count(known) > 1, "the server after its restart"
                )

            yield Place(world.kvpin, "tiny", "other", restart, "restarted")


def chat(name: str, question: str = "Who wrote it?") -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": f"You know all about {name}. {rules(name)}"},
        {"role": "user", "content": question},
    ]


def differs(shown: dict[str, Any]) -> tuple[str, str | None]:
    return shown["miss"], shown["differs_at"]


def test_first_seen_and_then_a_hit(place):
    assert differs(place.ask(chat("firsts"))) == ("first_seen", None)
    assert differs(place.ask(chat("firsts"))) == ("hit", None)


def test_a_changed_system_prompt(place):
    place.ask(chat("systems"))
    changed = chat("systems")
    changed[0]["content"] = changed[0]["content"].replace("never guess", "guess a lot", 1)
    shown = place.ask(changed)
    at = chat("systems")[0]["content"].index("never")
    assert differs(shown) == ("system_changed", f"messages[0], character {at}")
    assert f"messages[0], character {at}" in shown["explanation"]


def test_reordered_tools(place):
    place.ask(chat("tools"), tools=TOOLS)
    shown = place.ask(chat("tools"), tools=TOOLS[::-1])
    assert differs(shown) == ("tools_changed", "tools[0]")


def test_another_model(place):
    place.ask(chat("models"))
    shown = place.ask(chat("models"), model=place.other_model)
    assert differs(shown) == ("model_changed", None)
    assert shown["explanation"].endswith("ran on another model")


def test_of_another_tenant_nothing_is_told(place):
    place.ask(chat("secrets"))
    shown = place.ask(chat("secrets"), BLUE)
    assert differs(shown) == ("first_seen", None)
    assert shown["divergence"] is None


def test_a_flush_or_a_restart(place):
    place.ask(chat("restarts"))
    place.empty()
    assert differs(place.ask(chat("restarts"))) == (place.emptied, None)


def test_evicted(place):
    place.ask(chat("evictions"))
    for number in range(24):
        place.ask(
            chat(f"floods of {number}", f"Who wrote {number}? {rules(f'flood {number}')}"), max_tokens=1
        )
    assert differs(place.ask(chat("evictions"))) == ("evicted", None)


def test_a_refused_request_says_why(place):
    refused = place.ask(chat("refusals"), temperature="hot")
    assert (refused["status"], refused["miss"]) == (400, None)
    assert "failed on " in refused["explanation"]
    assert refused["error"] in refused["explanation"]


def test_the_command_shows_the_word_and_the_place(place):
    place.ask(chat("commands", f"[10:31] {rules('commands')}"))
    shown = place.ask(chat("commands", f"[10:32] {rules('commands')}"))

    def printed(*arguments):
        command = [sys.executable, "-m", "proxy.cli", "requests", *arguments, "--url", place.kvpin.url]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    listed = json.loads(printed("--json", "--limit", "1"))["requests"][0]
    assert (listed["miss"], listed["differs_at"]) == ("input_changed", "messages[1], character 5")
    assert "input_changed: messages[1], character 5" in printed("--limit", "1")
    assert "at messages[1], character 5" in " ".join(printed(shown["request_id"]).split())


def respond(place, text, key=RED, **fields):
    """A response, and the diagnostics in it."""
    body = {"model": place.model, "input": text, "max_output_tokens": 4, "temperature": 0, **fields}
    return place.post("responses", body, key).raise_for_status()


def diagnosed(place, text, compared, key=RED, *, stream, **fields):
    """The diagnostics of a response."""
    options = {"comparison_response_id": compared}
    answer = respond(place, text, key, stream=stream, prompt_cache_options=options, **fields)
    response = last_event(answer.text)["response"] if stream else answer.json()
    return response["prompt_cache_diagnostics"]


def last_event(stream):
    return [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")][-1]


@pytest.mark.parametrize("stream", [False, True])
def test_the_apis_own_field_of_responses(place, stream):
    question = f"[10:31] {rules(f'responses {stream}')}"
    first = respond(place, question, instructions="Be kind.")
    assert "prompt_cache_diagnostics" not in first.json()
    compared = first.json()["id"]

    def reason(text, key=RED, **fields):
        found = diagnosed(place, text, compared, key, stream=stream, **{"instructions": "Be kind."} | fields)
        return found.get("reason", found["type"])

    assert reason(question) == "cache_hit"
    assert reason(question.replace("31", "32")) == "input_changed"
    assert reason(question, model=place.other_model) == "model_changed"
    assert reason(question, BLUE) == "comparison_response_not_found"
    shown = diagnosed(place, question, compared, stream=stream, instructions="Be a kid.")["kvpin"]["at"]
    assert shown == {"kind": "system", "field": "instructions", "item": None, "part": None, "offset": 3}


def message(place, text, key=RED, **fields):
    """A message of Anthropic's API."""
    body = {"model": place.model, "messages": [{"role": "user", "content": text}], "max_tokens": 4, **fields}
    return place.post("messages", body, key).raise_for_status()


@pytest.mark.parametrize("stream", [False, True])
def test_the_apis_own_field_of_messages(place, stream):
    question = f"[10:31] {rules(f'messages {stream}')}"
    rule = f"You know all about {stream}. Be kind to everybody who asks."
    first = message(place, question, system=rule).json()
    assert "diagnostics" not in first

    def reason(text, key=RED, compared=first["id"], system=rule, **fields):
        asked = {"previous_message_id": compared}
        answer = message(place, text, key, stream=stream, system=system, diagnostics=asked, **fields)
        found = first_event(answer.text)["message"] if stream else answer.json()
        return found.get("diagnostics") and found["diagnostics"]["cache_miss_reason"]["type"]

    assert reason(question) is reason(question, compared=None) is None
    assert reason(question.replace("31", "32")) == "messages_changed"
    assert reason(question, system=rule.replace("Be kind", "Be rude")) == "system_changed"
    tools = [{"name": name, "input_schema": {"type": "object"}} for name in ("weather", "trains")]
    assert reason(question, tools=tools) == "tools_changed"
    assert reason(question, model=place.other_model) == "model_changed"
    assert reason(question, BLUE) == "previous_message_not_found"


def first_event(stream):
    return next(json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {"))


async def miss_of(client, url, answer):
    request_id = answer.raise_for_status().headers["x-request-id"]
    shown = (await client.get(f"{url}/admin/v1/requests/{request_id}")).raise_for_status().json()
    return differs(shown)


async def test_another_lora_adapter():
    body = {"model": "tiny", "prompt": rules("adapters"), "max_tokens": 2}
    with running_sglang(loras=("calm",), page_size=16) as running:
        async with over_sglang((running, None)) as world:
            found = []
            for model in ("tiny", "calm", "calm", "tiny"):
                answer = await world.post("completions", body | {"model": model})
                found.append(await miss_of(world.client, world.url, answer))
    assert found == [("first_seen", None), ("lora_changed", None), ("hit", None), ("hit", None)]


async def test_another_image():
    def asked(content):
        address = f"data:image/png;base64,{base64.b64encode(content).decode()}"
        parts = [
            {"type": "image_url", "image_url": {"url": address}},
            {"type": "text", "text": "What is it?"},
        ]
        return [{"role": "system", "content": rules("images")}, {"role": "user", "content": parts}]

    with running_vllm(num_gpu_blocks=1000) as running:
        async with over_vllm(running) as world:
            found = [
                await miss_of(world.client, world.url, await world.chat(asked(content)))
                for content in (b"cat", b"dog", b"dog")
            ]
    assert found == [("first_seen", None), ("media_changed", "messages[1].content[0]"), ("hit", None)]
