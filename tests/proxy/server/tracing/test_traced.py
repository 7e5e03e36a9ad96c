import json

import pytest

from proxy.observe.logs import configure_logs
from proxy.server.tracing.traced import engine_span_name, of_exchange, route_name
from proxy.settings import LogSettings
from tests.fakes import ASK, CHAT, STREAM, USAGE, FakeEngine, event
from tests.proxy.observe.test_metrics import record

SERVER = f"POST {CHAT}"
CLIENTS = {
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "tracestate": "vendor=1",
}


async def with_usage(exchange):
    if exchange.target == CHAT:
        await exchange.stream(
            event({"choices": [{"delta": {"content": "hi"}}]}),
            event({"choices": [], "usage": USAGE}),
            b"data: [DONE]\n\n",
        )
    else:
        await FakeEngine().script(exchange)


async def test_a_request_is_one_trace_from_the_client_to_the_engine(traced, collector, engine):
    engine.script = with_usage
    async with traced(reuse=True) as (proxy, client):
        answer = await client.post(CHAT, json=STREAM, headers=CLIENTS)
        assert answer.status_code == 200
        request_id = [record.request_id for record in proxy.flow.requests][-1]
    tree = [(depth, span.name, span.kind) for depth, span in collector.tree()]
    assert tree == [
        (0, SERVER, "SERVER"),
        (1, "parse", "INTERNAL"),
        (1, "tokenise", "INTERNAL"),
        (1, "place", "INTERNAL"),
        (1, "hold", "INTERNAL"),
        (1, "chat m", "CLIENT"),
    ]
    server, chat = collector.span(SERVER), collector.span("chat m")
    assert {span.trace_id for span in collector.spans} == {"0af7651916cd43dd8448eb211c80319c"}
    assert server.parent_id == "b7ad6b7169203331"
    (asked,) = [each for each in engine.seen if each.target == CHAT]
    parents = [value for name, value in asked.raw_headers if name == "traceparent"]
    assert parents == [f"00-{server.trace_id}-{chat.span_id}-01"]
    assert asked.headers["tracestate"] == "vendor=1"
    assert server.attributes == {
        "http.request.method": "POST",
        "url.path": CHAT,
        "http.route": CHAT,
        "http.response.status_code": 200,
        "kvpin.request.id": request_id,
    }
    n_tokens = collector.span("tokenise").attributes["gen_ai.usage.input_tokens"]
    assert n_tokens > 5
    assert collector.span("place").attributes["kvpin.engine"] == "a"
    first_chunk_s = chat.attributes.pop("gen_ai.response.time_to_first_chunk")
    assert 0 < first_chunk_s < (chat.end - chat.start) / 1e9 + 1
    spent = [name for name in chat.attributes if name.startswith("kvpin.first_byte.")]
    assert {"kvpin.first_byte.tokenise_s", "kvpin.first_byte.engine_s"} <= set(spent)
    assert sum(map(chat.attributes.pop, spent)) <= (chat.end - server.start) / 1e9 + 1
    assert chat.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai_compatible",
        "gen_ai.request.model": "m",
        "gen_ai.usage.input_tokens": n_tokens,
        "gen_ai.usage.cache_read.input_tokens": 32,
        "gen_ai.usage.output_tokens": 2,
        "http.response.status_code": 200,
        "kvpin.engine": "a",
        "kvpin.request.id": request_id,
        "server.address": "127.0.0.1",
        "server.port": engine.port,
    }
    assert server.start <= collector.span("hold").start <= chat.start <= chat.end <= server.end


async def test_no_prompt_and_no_query_gets_into_a_trace(traced, collector, engine):
    async def echo(exchange):
        if exchange.target.startswith(CHAT):
            await exchange.send({"error": {"message": f"cannot: {exchange.body.decode()}"}}, status=500)
        else:
            await FakeEngine().script(exchange)

    engine.script = echo
    async with traced() as (_, client):
        secret = {"model": "m", "messages": [{"role": "user", "content": "my secret"}]}
        answer = await client.post(f"{CHAT}?token=secret", json=secret)
        assert answer.status_code >= 500
        assert "secret" in answer.text
    assert collector.span("chat m").failed
    assert collector.span("chat m").attributes["error.type"] == "EngineRejected"
    assert collector.span(SERVER).failed
    assert not any(b"secret" in body for body in collector.raw)


async def test_each_attempt_has_its_spans(traced, collector, engine):
    async def die(exchange):
        if exchange.target == CHAT:
            exchange.die()
        else:
            await FakeEngine().script(exchange)

    engine.script = die
    async with FakeEngine("b", die) as other, traced(other) as (_, client):
        assert (await client.post(CHAT, json=ASK)).status_code == 502
    attempts = [span for span in collector.spans if span.name == "chat m"]
    assert {span.attributes["kvpin.engine"] for span in attempts} == {"a", "b"}
    assert {span.attributes["error.type"] for span in attempts} == {"EngineDied"}
    assert collector.span("place").attributes["kvpin.reason"] == "balanced"
    assert collector.span(SERVER).attributes["http.response.status_code"] == 502


async def test_a_wait_for_busy_engines_is_within_the_placement(traced, collector, monkeypatch):
    monkeypatch.setattr("proxy.fleet.pool.Pool.is_busy", lambda *_: True)
    async with traced(limits={"queue_s": 0.3}) as (_, client):
        assert (await client.post(CHAT, json=ASK)).status_code == 503
    place, queue = collector.span("place"), collector.span("queue")
    assert (queue.parent_id, queue.start) == (place.span_id, place.start)
    assert 0.2e9 < queue.end - queue.start <= place.end - place.start


async def test_what_fails_before_the_flow_has_a_trace_too(traced, collector):
    async with traced(api_keys=[{"key": "k", "tenant": "acme"}]) as (_, client):
        assert (await client.post(CHAT, json=ASK)).status_code == 401
        asked = await client.post("/v1/files/file-1", json={}, headers={"authorization": "Bearer k"})
    assert collector.span(SERVER).attributes["http.response.status_code"] == 401
    assert collector.span("POST /v1/*").attributes["http.response.status_code"] == asked.status_code


async def test_parts_of_a_request_for_several_answers_are_in_its_trace(traced, collector):
    async with traced() as (_, client):
        assert (await client.post(CHAT, json={**ASK, "n": 2})).status_code == 200
    server = collector.span(SERVER)
    assert {span.parent_id for span in collector.spans if span.name == "chat m"} == {server.span_id}


async def test_log_lines_and_exemplars_lead_to_the_trace(traced, collector, engine, capsys):
    async def refuse(exchange):
        if exchange.target == CHAT and exchange.json.get("user") == "wrong":
            await exchange.send({"error": {"message": "no"}}, status=500)
        else:
            await FakeEngine().script(exchange)

    engine.script = refuse
    configure_logs(LogSettings(format="json"))
    async with traced() as (_, client):
        await client.post(CHAT, json={**ASK, "user": "wrong"}, headers=CLIENTS)
        await client.post(CHAT, json=STREAM, headers=CLIENTS)
        page = await client.get("/metrics", headers={"accept": "application/openmetrics-text"})
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    (refused,) = [line for line in lines if line["event"] == "the engine refused a request"]
    assert refused["trace_id"] == "0af7651916cd43dd8448eb211c80319c"
    assert refused["span_id"] in {span.span_id for span in collector.spans if span.name == SERVER}
    buckets = [line for line in page.text.splitlines() if "kvpin_time_to_first_token_seconds_bucket" in line]
    assert sum('# {trace_id="0af7651916cd43dd8448eb211c80319c"}' in line for line in buckets) == 1


async def test_a_trace_that_the_client_does_not_keep_is_not_kept(traced, collector, engine):
    unkept = CLIENTS["traceparent"][:-1] + "0"
    async with traced() as (_, client):
        await client.post(CHAT, json=STREAM, headers={"traceparent": unkept})
        page = await client.get("/metrics", headers={"accept": "application/openmetrics-text"})
    assert collector.spans == []
    (asked,) = [each for each in engine.seen if each.target == CHAT]
    parent = asked.headers["traceparent"]
    assert (parent.split("-")[1], parent.split("-")[3]) == ("0af7651916cd43dd8448eb211c80319c", "00")
    assert "trace_id" not in page.text


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/tokenize", "/tokenize"),
        ("/v1/responses/resp_1", "/v1/*"),
        ("/v1/" + "x" * 60_000, "/v1/*"),
    ],
    ids=["chat", "native", "a response", "unknown"],
)
def test_a_route_names_no_single_thing_and_a_long_path_is_cut(path, name):
    assert route_name(path) == name
    expected = {"http.request.method": "GET", "url.path": path[:256], "http.route": name}
    assert of_exchange("GET", path) == expected


def test_a_span_is_named_after_what_is_asked_of_the_model():
    asked = record(lora="ada")
    asked.route = "/v1/completions"
    assert engine_span_name(asked) == "text_completion ada"
    asked.route, asked.lora = "/v1/rerank", None
    assert engine_span_name(asked) == "forward m"
