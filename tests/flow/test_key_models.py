"""A key that names its models reaches no other, by any API, and hears of no other."""

from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from engine_adapter.llama_server.options import ROUTES
from proxy.core.life import Cause
from proxy.core.quotas import TenantLimits
from proxy.request.tenants import ApiKey, Tenants
from tests.fakes import (
    ASK,
    CHAT,
    INFO,
    FakeAdapter,
    FakeEngine,
    answer,
    asked,
    client_of,
    is_openai_error,
    proxy_over,
)
from tests.proxy.api.test_websockets import SocketEngine, kvpin, over, refusal

ALL, FEW = {"authorization": "Bearer all"}, {"authorization": "Bearer few"}
FORM = b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\n%b\r\n--b--\r\n'
MULTIPART = {"content-type": "multipart/form-data; boundary=b"}


def tenants_for(*models):
    return Tenants([ApiKey.of("all", "t"), ApiKey.of("few", "t", frozenset(models))])


async def transcribe(exchange):
    await exchange.send({"text": ""})


@asynccontextmanager
async def served(*models, script=answer, **options):
    """Engines of the models m, with the adapter ada, and secret; what each got, and a client with a key for
    these models."""
    async with FakeEngine("a", script) as a, FakeEngine("b", script) as b:
        info = replace(INFO, loras=frozenset({"ada"}), routes=ROUTES)
        engines = FakeAdapter("a", a.url, info), FakeAdapter("b", b.url, info, model="secret")
        options = {"aliases": {"fast": "m"}, **options}
        async with (
            proxy_over(*engines, tenants=tenants_for(*models), **options) as proxy,
            client_of(proxy, headers=FEW) as client,
        ):
            yield proxy, client, (a, b)


BODIES = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": ["a", "b"], "n": 2},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/embeddings": {"input": "hi"},
    "/completion": {"prompt": "hi"},
    "/tokenize": {"content": "hi"},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("model", ["secret", "m", "nothing"])
async def test_another_model_is_refused_as_if_it_did_not_exist(path, model):
    async with served("fast") as (proxy, client, engines):
        response = await client.post(path, json={"model": model, **BODIES[path]})
        assert response.status_code == 404
        message = response.json()["error"]["message"]
        assert message == (
            f"the model {model!r} does not exist, or this key may not use it; for this key: fast"
        )
        assert all(engine.seen == [] for engine in engines)
        assert 'kvpin_refused_total{reason="model"}' in proxy.metrics.render().decode()
        await client.post(path, json={"model": "fast", **BODIES[path]})
        assert engines[0].seen


async def test_the_error_has_openais_code_and_a_cause_of_its_own():
    async with served("fast") as (proxy, client, _):
        response = await client.post(CHAT, json={**ASK, "model": "secret"})
        assert is_openai_error(response, 404, "model_not_found", "model")
        assert (proxy.last.status, proxy.last.model) == (404, "secret")
        assert proxy.last.cause is Cause.MODEL_REFUSED


@pytest.mark.parametrize(
    ("models", "status"),
    [(("fast", "ada"), 200), (("secret", "ada"), 200), (("fast",), 404), (("m", "secret"), 404)],
)
async def test_a_read_without_a_name_shows_the_model_of_its_key_and_no_other(models, status):
    """The answer of m's engine may show its adapter ada."""
    async with served(*models) as (_, client, engines):
        assert (await client.get("/props")).status_code == status
        seen = [bool(engine.seen) for engine in engines]
        assert seen == [status == 200 and "fast" in models, status == 200 and "secret" in models]


@pytest.mark.parametrize(("models", "status"), [(("m",), 404), (("ada",), 200), (("m", "ada"), 200)])
async def test_a_lora_adapter_is_a_name_of_its_own(models, status):
    async with served(*models) as (_, client, _engines):
        assert (await client.post(CHAT, json={**ASK, "model": "ada"})).status_code == status


@pytest.mark.parametrize(("models", "status"), [(("secret",), 404), (("m",), 200), (("fast",), 200)])
async def test_without_a_name_the_model_that_it_would_get_counts(models, status):
    async with served(*models) as (proxy, client, _engines):
        proxy.fleet.default_model = "m"
        body = {name: value for name, value in ASK.items() if name != "model"}
        assert (await client.post(CHAT, json=body)).status_code == status
        assert (await client.post(CHAT, json={**ASK, "model": "unknown"})).status_code == 404


async def test_without_a_name_nobody_hears_of_other_models():
    async with served("fast") as (_, client, _engines):
        response = await client.post(CHAT, json={"messages": ASK["messages"]})
    assert response.status_code == 404
    assert response.json()["error"]["message"] == (
        "this key needs the name of a model, in the body or as ?model=NAME; for this key: fast"
    )


@pytest.mark.parametrize("field", ["lora", "lora_path", "lora_request"])
@pytest.mark.parametrize("path", ["/v1/completions", "/completion", CHAT])
async def test_no_field_chooses_an_adapter_beside_the_model(path, field):
    async with served("m") as (_, client, engines):
        response = await client.post(path, json={"model": "m", field: "ada", **BODIES[path]})
        assert response.status_code == 403
        assert not any(engine.seen for engine in engines)
        allowed = await client.post(path, json={"model": "m", field: "ada", **BODIES[path]}, headers=ALL)
        assert allowed.status_code == 200


@pytest.mark.parametrize("query", ["model=ada", "model=m&model=ada", "model=ada&model=m"])
@pytest.mark.parametrize("named", [{}, {"model": "m"}])
async def test_no_query_names_another_model(query, named):
    async with served("m") as (_, client, engines):
        response = await client.post(f"{CHAT}?{query}", json={"messages": ASK["messages"], **named})
        assert response.status_code == 404
        assert not any(engine.seen for engine in engines)
        response = await client.post(f"{CHAT}?model=m", json={"messages": ASK["messages"], **named})
        assert response.status_code == 200


@pytest.mark.parametrize(
    "name",
    [b'name="model"', b"name=model", b"name*=utf-8''mod%65l", b'name="lora_path"'],
)
async def test_a_form_names_no_second_model(name):
    second = b"content-disposition: form-data; %b\r\n\r\nada\r\n--b--\r\n" % name
    async with served("m", script=transcribe) as (_, client, (a, _b)):
        form = (FORM % b"m").replace(b"--b--\r\n", b"--b\r\n") + second
        response = await client.post("/v1/audio/transcriptions", content=form, headers=MULTIPART)
        assert response.status_code == 400, response.text
        assert "one model" in response.text
        assert not any(b"ada" in each.body and b"--b--" in each.body for each in a.seen)


@pytest.mark.parametrize(("model", "status"), [(b"secret", 404), (b"m", 404), (b"fast", 200)])
async def test_the_model_of_a_form(model, status):
    async with served("fast", script=transcribe) as (_, client, _engines):
        response = await client.post("/v1/audio/transcriptions", content=FORM % model, headers=MULTIPART)
        assert response.status_code == status


async def test_a_form_is_read_where_only_the_key_makes_a_difference():
    tenants = tenants_for("m")
    async with asked(transcribe, headers=FEW | MULTIPART, tenants=tenants) as (_proxy, client, *_):
        for model, status in ((b"m", 200), (b"secret", 404)):
            response = await client.post("/v1/audio/transcriptions", content=FORM % model)
            assert response.status_code == status


async def test_a_websocket():
    path = "/v1/realtime?model="
    async with kvpin(SocketEngine(), tenants=tenants_for("m")) as proxy:
        status, body = await refusal(proxy, f"{path}secret", additional_headers=FEW)
        assert (status, "does not see the models" in body) == (403, True)
        status, _ = await refusal(proxy, f"{path}m", additional_headers=FEW)
        assert status == 403  # its frames may name another model
        async with over(proxy, f"{path}m", additional_headers=ALL) as client:
            await client.send("hello")
            assert await client.recv() == "hello"


@pytest.mark.parametrize("path", ["/v1/batches", "/v1/messages/batches"])
async def test_a_batch_names_models_that_kvpin_does_not_see(path):
    async with served("fast") as (_, client, engines):
        response = await client.post(path, json={"model": "fast", "input_file_id": "file-1"})
        assert response.status_code == 403
        assert "does not see the models" in response.json()["error"]["message"]
        assert all(engine.seen == [] for engine in engines)


async def test_a_model_of_the_key_that_is_not_served_is_not_offered():
    async with served("gone") as (_, client, _engines):
        response = await client.post(CHAT, json={**ASK, "model": "gone"})
    assert response.json()["error"]["message"].endswith("for this key: no other model")


@pytest.mark.parametrize(("key", "names"), [(ALL, {"m", "ada", "secret", "fast"}), (FEW, {"fast", "ada"})])
async def test_only_its_models_are_listed(key, names):
    async with served("fast", "ada", "gone") as (_, client, _engines):
        listed = (await client.get("/v1/models", headers=key)).json()["data"]
        assert {card["id"] for card in listed} == names
        for name in ("m", "ada", "secret", "fast", "gone"):
            response = await client.get(f"/v1/models/{name}", headers=key)
            assert response.status_code == (200 if name in names else 404)


class TestLimits:
    async def test_answers_tell_what_is_left(self):
        tenants = Tenants([ApiKey.of("all", "t")], {"t": TenantLimits(2, 600)})
        async with asked(answer, headers=ALL, tenants=tenants) as (_proxy, client, *_):
            answers = [await client.post(CHAT, json=ASK) for _ in range(3)]
            assert "x-ratelimit-limit-requests" not in (await client.get("/v1/models")).headers
        assert [response.status_code for response in answers] == [200, 200, 429]
        for response, left in zip(answers, "100", strict=True):
            assert response.headers["x-ratelimit-limit-requests"] == "2"
            assert response.headers["x-ratelimit-remaining-requests"] == left
            assert response.headers["x-ratelimit-reset-requests"].endswith("s")
            assert response.headers["x-ratelimit-limit-tokens"] == "600"
            assert int(response.headers["x-ratelimit-remaining-tokens"]) < 600
