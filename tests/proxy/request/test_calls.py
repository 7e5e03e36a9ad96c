import asyncio

import msgspec
import pytest

from engine_adapter import Headers, JsonBody, Upload
from proxy.headers import SESSION_HEADERS
from proxy.request import calls
from proxy.request.calls import FIELDS, MAX_NAME, Call, Nobody, Reply, Session, session_of


def call(body=None, path="/v1/chat/completions"):
    return Call("r", "POST", path, Headers([(b"authorization", b"Bearer secret")]), body)


@pytest.mark.parametrize(
    ("body", "model", "streams"),
    [
        (None, None, False),
        (JsonBody(b"{}"), None, False),
        (JsonBody(b'{"model": "m", "stream": true}'), "m", True),
        (JsonBody(b'{"model": 5, "stream": "yes"}'), None, False),
    ],
)
def test_what_a_body_says(body, model, streams):
    assert (call(body).model, call(body).streams) == (model, streams)


@pytest.mark.parametrize("body", [None, JsonBody(b"{}"), Upload(None, None)])
def test_the_query_names_the_model_where_the_body_does_not(body):
    assert call(body, "/v1/files?limit=3&model=org%2Fm").model == "org/m"
    assert call(JsonBody(b'{"model": "n"}'), "/v1/batches?model=m").model == "n"


def test_another_model_takes_its_place_in_the_query():
    named = call(path="/v1/realtime?a=%2B&model=x&b=").naming("org/m")
    assert (named.path, named.model) == ("/v1/realtime?a=%2B&model=org%2Fm&b=", "org/m")
    unnamed = call(path="/v1/realtime?a=1")
    assert unnamed.naming("m") is unnamed


@pytest.mark.parametrize(
    ("path", "body", "runs"),
    [
        ("/v1/chat/completions", JsonBody(b"{}"), True),
        ("/v1/responses", None, False),
        ("/v1/embeddings", JsonBody(b"{}"), False),
        ("/completion", JsonBody(b"{}"), True),
    ],
)
def test_whether_it_goes_on_from_a_prompt(path, body, runs):
    assert call(body, path).runs_prompt is runs


@pytest.mark.parametrize(
    "path", ["/v1/%63ompletions", "/v1//completions?a=b", "/v1%2Fcompletions", "/v1/completions/"]
)
def test_the_route_is_the_one_that_engines_see(path):
    assert call(path=path).route == "/v1/completions"


def test_keys_and_prompts_stay_out_of_logs():
    assert "secret" not in repr(call(JsonBody(b'{"prompt": "secret"}')))


class Client(Nobody):
    """Notes that somebody waited for it."""

    waits = 0

    async def drain(self):
        self.waits += 1
        self.is_full = False


class TestReply:
    @pytest.fixture
    def client(self):
        return Client()

    @pytest.fixture
    def reply(self, client):
        return Reply(client)

    async def test_an_answer_that_cannot_begin_has_not_begun(self, reply, client):
        def refuse(_status, _headers):
            raise ValueError("line break")

        client.start = refuse
        with pytest.raises(ValueError, match="line break"):
            await reply.start(200, [])
        assert not reply.started

    @pytest.mark.parametrize(
        ("last", "complete"),
        [
            (b"data: the end is [DONE]\n\n", False),
            (b"data: x\n\ndata: y data: [DONE]\n\n", False),
            (b"data: x\n\ndata:[DONE]\r\n\r\n", True),
            (b"data: [DONE]\n\n", True),
        ],
    )
    async def test_a_stream_is_complete_with_its_done_wherever_that_is_cut(self, last, complete):
        for cut in range(1, len(last)):
            ends, reply = [], Reply(Nobody())
            reply.on_end = lambda ends=ends: ends.append(1)
            await reply.start(200, [], is_events=True)
            reply.put(last[:cut])
            assert not reply.complete
            reply.put(last[cut:])
            assert reply.complete is complete, cut
            await reply.finish()
            assert len(ends) == 1

    @pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
    async def test_the_events_of_a_stream_are_counted(self, reply, end):
        await reply.start(200, [], is_events=True)
        await reply.write(b'data: {"text": "a\\n\\n"}' + end)
        await reply.write(b": note" + end + b"data: [DONE]" + end)
        await reply.write(b"data: {}" + end + b"data: {}" + end)  # short ones, in a piece
        assert reply.events == 5

    async def test_a_file_has_no_events(self, reply):
        await reply.start(200, [])
        await reply.write(b"a line\n\nanother one\n\n")
        await reply.write(b'{"a": "}"}\n\n')
        assert reply.events == 0

    async def test_only_a_full_socket_is_waited_for_and_not_before_much_is_read_ahead(
        self, reply, client, monkeypatch
    ):
        monkeypatch.setattr(calls, "READ_AHEAD", 10)
        await reply.write(b"1" * 100)
        assert client.waits == 0
        for _ in range(2):
            client.is_full = True
            await reply.write(b"2" * 10)
            assert client.waits == 0
            client.is_full = False
            await reply.write(b"3")
        client.is_full = True
        await reply.write(b"4" * 10)
        await reply.write(b"5")
        assert client.waits == 1
        client.is_full = True
        await reply.finish(b"6" * 100)
        assert client.waits == 1, "its engine is done"


async def test_a_wait_for_the_client_that_is_interrupted_is_over():
    class Full(Nobody):
        is_full = True

        async def drain(self):
            raise asyncio.CancelledError

    reply = Reply(Full())
    with pytest.raises(asyncio.CancelledError):
        await reply.drain()
    assert not reply.waits


async def test_a_whole_answer_was_written():
    """An engine's error after it is not told the client as another answer."""
    reply = Reply(Nobody())
    await reply.start(200, [])
    await reply.finish(b"{}")
    assert reply.has_written


NONE = Headers([])


def sent(headers):
    return Headers.of(headers.items())


def body(**fields):
    return JsonBody(msgspec.json.encode(fields))


def test_the_name_that_tells_conversations_apart_best_counts():
    named = {field: field for field in FIELDS}
    assert session_of("alice", sent({"x-session-id": "h"}), body(**named)) == Session("alice", "h")
    assert session_of("alice", NONE, body(**named)) == Session("alice", "session_id")
    assert session_of("alice", NONE, body(prompt_cache_key="k")) == Session("alice", "k")
    best, next_best, *_ = SESSION_HEADERS
    assert session_of(None, sent({next_best: "2", best: "1"}), None).name == "1"


@pytest.mark.parametrize("name", ['""', "7", "null", '["s"]', '"' + "x" * (MAX_NAME + 1) + '"', "1e999"])
def test_what_is_no_name_is_passed_over(name):
    assert session_of(None, NONE, JsonBody(b'{"session_id": %b}' % name.encode())) is None
    both = JsonBody(b'{"session_id": %b, "prompt_cache_key": "k"}' % name.encode())
    assert session_of(None, NONE, both).name == "k"


def test_what_many_share_or_one_request_has_alone_is_none():
    headers = sent({"x-correlation-id": "c", "x-request-id": "r"})
    assert session_of(None, headers, body(user="everybody")) is None


def test_a_digest_tells_conversations_and_tenants_apart():
    named = [(None, "ab"), ("a", "b"), ("ab", ""), ("", "ab"), ("b", "b")]
    sessions = [Session(tenant, name) for tenant, name in named]
    assert len({session.digest for session in sessions}) == 5
    assert Session("a", "b").digest == Session("a", "b").digest < 2**64
