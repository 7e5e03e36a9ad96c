"""Tenants of one kvpin never meet: every route, tier and cache, both directions, two kinds of engines.

Elsewhere: images (test_media.py), diagnostics (test_diagnostics.py), recordings (test_recording.py), routes
of llama-server (test_llama_native.py), salts of SGLang, TensorRT-LLM and vLLM (their live tests), responses
that engines keep (tests/proxy/fleet/test_destinations.py), tokenised chats
(tests/proxy/prompt/test_known_chats.py).
"""

from __future__ import annotations

import hashlib
from itertools import count

import httpx
import pytest

from scripts.make_gguf import gguf_path
from tests.live.conftest import Kvpin, running_kvpin
from tests.llama import llama_server, memory_dir

pytestmark = pytest.mark.live

# A tenant may have the first few tokens from a case of its own before; of the prompt, there are over 100.
FEW = 16
STORY = "The lighthouse keeper counted ships until the fog came in and hid them all. " * 6
NUMBERS = count()
EMBEDDED, LLAMA = "kvpin-tiny", "tiny"
KEYS = {"a": "key-a", "b": "key-b", "c": "key-c"}


@pytest.fixture(scope="module")
def kvpin(tmp_path_factory):
    """An embedded engine and a llama-server, both with a host tier, and three tenants; one key is hashed."""
    path = tmp_path_factory.mktemp("tenants")
    hashed = f"sha256:{hashlib.sha256(b'key-b').hexdigest()}"
    entries = [f'[[api_keys]]\nkey = "{k}"\ntenant = "{t}"\n' for t, k in {**KEYS, "b": hashed}.items()]
    with memory_dir() as saved, pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLAMA_SERVER", llama_server())
        llama = f"-m {gguf_path('tiny')} -np 2 -c 4096 -t 1 --slot-save-path {saved}"
        (path / "kvpin.toml").write_text('admin_key = "admin"\n' + "".join(entries))
        engines = ("embedded: --threads 1 --kv-blocks 512 --host-cache-bytes 64MiB", f"llama-server: {llama}")
        flags = [word for engine in engines for word in ("--managed", engine)]
        with running_kvpin(path / "log", "--config", str(path / "kvpin.toml"), *flags) as kvpin:
            yield kvpin


def post(kvpin: Kvpin, route: str, tenant: str, body: dict) -> httpx.Response:
    return kvpin.post(route, body, headers={"authorization": f"Bearer {KEYS[tenant]}"})


def admin(kvpin: Kvpin, verb: str, **body) -> None:
    answer = kvpin.admin("POST", verb, json=body, headers={"authorization": "Bearer admin"})
    assert answer.raise_for_status().json()["state"] == "done"


def chat(text):
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 2, "temperature": 0}


def cached_of_openai(usage):
    return (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


ROUTES = {
    "chat/completions": (chat, cached_of_openai),
    "completions": (lambda text: {"prompt": text, "max_tokens": 2, "temperature": 0}, cached_of_openai),
    "messages": (chat, lambda usage: usage["cache_read_input_tokens"]),
    "responses": (
        lambda text: {"input": text, "max_output_tokens": 16, "temperature": 0, "store": False},
        lambda usage: usage["input_tokens_details"]["cached_tokens"],
    ),
}


@pytest.mark.parametrize("direction", ["ab", "ba"])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("model", [EMBEDDED, LLAMA])
def test_nobody_hits_what_another_tenant_computed(kvpin, model, route, direction):
    make, cached_of = ROUTES[route]
    body = {"model": model, **make(f"Case {next(NUMBERS)}. {STORY}")}

    def cached(tenant):
        answer = post(kvpin, route, tenant, body)
        assert answer.status_code == 200, answer.text
        return cached_of(answer.json()["usage"])

    owner, other = direction
    assert cached(owner) < FEW
    assert cached(owner) > 100
    assert cached(other) < FEW  # it lies on the GPU
    admin(kvpin, "offload", all=True)
    assert cached("c") < FEW  # and in host memory, or in a file
    assert cached(owner) > 100
    admin(kvpin, "flush", tenant=owner)
    assert cached(owner) < FEW
    assert cached(other) > 100  # whose own it is by now


def test_what_a_tenant_embeds_is_nobody_elses(kvpin):
    text = f"Case {next(NUMBERS)}. {STORY}"

    def embedded(tenant):
        vector = post(kvpin, "embeddings", tenant, {"model": EMBEDDED, "input": text}).raise_for_status()
        return vector.json()["data"][0]["embedding"]

    def cached(tenant):
        body = {"model": EMBEDDED, "prompt": text, "max_tokens": 1}
        answer = post(kvpin, "completions", tenant, body).raise_for_status()
        reused = cached_of_openai(answer.json()["usage"])
        assert int(answer.headers["x-kvpin-predicted-tokens"]) == reused
        return reused

    vector = embedded("a")
    assert cached("b") == 0
    assert embedded("b") == pytest.approx(vector, abs=1e-5)
    assert cached("c") == 0
    assert cached("a") > 100  # what was embedded is reused like any prompt


@pytest.mark.parametrize("path", ["/admin/v1/stats", "/admin/v1/requests", "/admin/v1/openapi.json"])
def test_a_tenants_key_opens_no_admin_route_and_the_admin_key_no_other(kvpin, path):
    for key in KEYS.values():
        answer = httpx.get(f"{kvpin.url}{path}", headers={"authorization": f"Bearer {key}"}, trust_env=False)
        assert answer.status_code == 401
    admin_key = {"authorization": "Bearer admin"}
    assert httpx.get(f"{kvpin.url}{path}", headers=admin_key, trust_env=False).status_code == 200
    assert httpx.get(f"{kvpin.base_url}/models", headers=admin_key, trust_env=False).status_code == 401


def test_where_all_engines_of_a_model_share_kv_tenants_do_and_it_is_foreseen(start_engine, tmp_path):
    entries = "".join(f'[[api_keys]]\nkey = "{key}"\ntenant = "{tenant}"\n' for tenant, key in KEYS.items())
    (tmp_path / "kvpin.toml").write_text('admin_key = "admin"\n' + entries)
    url = start_engine("--kv-blocks", "512").url
    flags = ("--config", str(tmp_path / "kvpin.toml"), f"--engine=embedded={url},id=e,share_kv=true")
    with running_kvpin(tmp_path / "log", *flags) as kvpin:

        def cached(tenant, **fields):
            answer = post(kvpin, "chat/completions", tenant, {"model": EMBEDDED, **chat(STORY), **fields})
            reused = cached_of_openai(answer.raise_for_status().json()["usage"])
            assert int(answer.headers["x-kvpin-predicted-tokens"]) == reused
            return reused

        assert cached("a") == 0
        assert cached("b") > 100
        assert cached("a", cache_salt="its own") == 0  # a client's salt stays
        assert cached("c", cache_salt="its own") > 100
        admin(kvpin, "flush", messages=chat(STORY)["messages"], tenant="c")
        assert cached("a") < FEW
