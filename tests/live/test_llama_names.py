"""What clients of a llama-server behind kvpin see of model names and fingerprints."""

from __future__ import annotations

import json

import httpx
import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from tests.live.llama_world import MODEL, WAIT_S, llama_world

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    flags = ("--model-alias", f"gpt-4o={MODEL}", "--model-alias", "lost=gone")
    with llama_world(tmp_path_factory.mktemp("world"), kvpin_flags=flags) as world:
        yield world


@pytest.fixture(scope="module")
def client(world):
    with OpenAI(base_url=world.base_url, api_key="unused", max_retries=0, timeout=60) as client:
        yield client


def ask(client, model, text="Tell me of the sea.", **options):
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(
        model=model, messages=messages, max_tokens=4, temperature=0, **options
    )


@pytest.mark.parametrize("name", [MODEL, "gpt-4o", "made-up"])
def test_a_llama_server_takes_any_name(world, client, name):
    with OpenAI(base_url=f"{world.servers[0].url}/v1", api_key="unused", timeout=60) as direct:
        assert ask(client, name).model == ask(direct, name).model


def test_under_each_name_the_same_kv_is_reused_and_foreseen(client):
    text = "The tide was out. " * 40
    for number, name in enumerate(("gpt-4o", "made-up", MODEL)):
        raw = client.chat.completions.with_raw_response.create(
            model=name, messages=[{"role": "user", "content": text}], max_tokens=1, temperature=0
        )
        reported = raw.parse().usage.prompt_tokens_details.cached_tokens
        assert int(raw.headers["x-kvpin-predicted-tokens"]) == reported
        assert (reported > 100) is (number > 0)


def test_an_alias_of_what_is_not_served_is_a_404(client):
    with pytest.raises(NotFoundError, match="'lost' is an alias of 'gone'") as caught:
        ask(client, "lost")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_the_models_are_listed(client):
    assert sorted(card.id for card in client.models.list()) == ["gpt-4o", MODEL]
    assert client.models.retrieve("gpt-4o").root == MODEL


def test_a_card_is_the_servers_own_but_for_what_kvpin_names(world, client):
    with OpenAI(base_url=f"{world.servers[0].url}/v1", api_key="unused", timeout=60) as direct:
        (own,) = direct.models.list()
    for name in (MODEL, "gpt-4o"):
        card = client.models.retrieve(name)
        assert (card.meta, card.aliases, card.tags) == (own.meta, own.aliases, own.tags)
        assert card.owned_by == "kvpin"


@pytest.mark.parametrize("more", [0, 1], ids=["refused by the server", "refused by kvpin"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_does_not_fit_has_the_servers_fields_and_openais_code(client, world, stream, more):
    """A prompt as long as the context leaves no room for an answer: only the server minds."""
    limit = httpx.get(f"{world.servers[0].url}/props", trust_env=False).json()
    context = limit["default_generation_settings"]["n_ctx"]
    with pytest.raises(BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=[5] * (context + more), max_tokens=1, stream=stream)
    assert (caught.value.code, caught.value.type) == ("context_length_exceeded", "exceed_context_size_error")
    assert {name: caught.value.body[name] for name in ("n_prompt_tokens", "n_ctx")} == {
        "n_prompt_tokens": context + more,
        "n_ctx": context,
    }


def events(url: str, body: dict) -> list[dict]:
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=WAIT_S, trust_env=False)
    datas = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(data) for data in datas]


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}])
def test_the_events_of_a_stream_are_the_servers_own_fingerprint_and_all(world, options):
    messages = [{"role": "user", "content": "Who goes there?"}]
    body = {"model": "x", "messages": messages, "max_tokens": 4, "temperature": 0, "stream": True, **options}
    through, direct = events(world.kvpin.url, body), events(world.servers[0].url, body)
    for event in (*through, *direct):
        for name in ("id", "created", "timings", "usage"):
            event.pop(name, None)
    assert through == direct
    assert all(event["system_fingerprint"] for event in through)
