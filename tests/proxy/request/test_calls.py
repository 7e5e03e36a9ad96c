import pytest

from engine_adapter import JsonBody
from proxy.request.calls import Call, Reply


def call(body=None, path="/v1/chat/completions"):
    return Call("r", "POST", path, {"authorization": "Bearer secret"}, body)


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


def test_the_route_has_no_query():
    assert call(path="/v1/models?limit=3").route == "/v1/models"


@pytest.mark.parametrize("path", ["/v1/%63ompletions", "/v1//completions?a=b", "/v1%2Fcompletions"])
def test_the_route_is_the_one_that_engines_see(path):
    assert call(path=path).route == "/v1/completions"


def test_keys_and_prompts_stay_out_of_logs():
    assert "secret" not in repr(call(JsonBody(b'{"prompt": "secret"}')))


class TestReply:
    @pytest.fixture
    def sent(self):
        return []

    @pytest.fixture
    def reply(self, sent):
        async def send(message):
            sent.append(message)

        return Reply(send)

    async def test_headers_keep_stray_bytes(self, reply, sent):
        await reply.start(200, [(b"x-odd", b"za\xc5\xbc")])
        assert sent[0]["headers"] == [(b"x-odd", b"za\xc5\xbc")]
        assert reply.started

    @pytest.mark.parametrize(
        ("last", "complete"),
        [(b"data: 1\n\n", False), (b"data: [DONE]\n\n", True), (b"data: [DONE]\r\n\r\n", True)],
    )
    async def test_a_stream_is_complete_with_its_done(self, reply, sent, last, complete):
        await reply.write(last)
        assert sent == [{"type": "http.response.body", "body": last, "more_body": True}]
        assert reply.complete is complete

    @pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
    async def test_the_events_of_a_stream_are_counted(self, reply, end):
        await reply.write(b'data: {"text": "a\\n\\n"}' + end)
        await reply.write(b": note" + end + b"data: [DONE]" + end)
        assert reply.events == 3

    async def test_the_end_of_the_body_completes_it(self, reply, sent):
        await reply.finish(b"{}")
        assert sent == [{"type": "http.response.body", "body": b"{}"}]
        assert reply.complete
