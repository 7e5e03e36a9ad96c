"""The stages of an answer: its id is noted, the diagnostics and `cache_write_tokens` are added."""

import json

import pytest

from engine_adapter import Headers, JsonBody
from proxy.core.differences import Difference, Kind
from proxy.core.misses import Compared, Diagnosis
from proxy.errors import BadRequest
from proxy.request.diagnostics import APIS, IdNoted, diagnosed, writes_counted
from proxy.request.records import RequestRecord
from tests.proxy.request.passing import passed

RESPONSES, MESSAGES = APIS["/v1/responses"], APIS["/v1/messages"]
CHATS = APIS["/v1/chat/completions"]
OTHER = {"request_id": "r1", "n_tokens": 50, "common_tokens": 20, "repeated_tokens": 40}
MISSED = Diagnosis(n_tokens=64, compared=Compared(**OTHER, difference=Difference(Kind.TOOLS, "tools")))
JSON = (b"content-type", b"application/json")


class World:
    """A client behind the diagnostics, the id that was noted, and what was asked about reuse."""

    def __init__(self, api=None, diagnosis=MISSED):
        """`api`: the client asks for its diagnostics."""
        self.compared, self.diagnosis = [], diagnosis
        self.record = RequestRecord("r", 0.0, "/v1/x", None, None, stream=False)
        self.stages = [IdNoted(self.record)]
        if api is not None:
            asked = self._diagnose if diagnosis is not None else None
            self.stages.insert(0, diagnosed(api, lambda: asked))

    def _diagnose(self, reused):
        self.compared.append(reused)
        return self.diagnosis

    def whole(self, answer, status=200):
        self.client = passed(*self.stages, whole=answer, status=status)

    def streamed(self, *chunks):
        self.client = passed(*self.stages, chunks=chunks)


@pytest.mark.parametrize(
    ("api", "body", "asked"),
    [
        (RESPONSES, {"prompt_cache_options": {"comparison_response_id": "resp_1"}}, "resp_1"),
        (RESPONSES, {"prompt_cache_options": {"comparison_response_id": None}}, None),
        (RESPONSES, {"prompt_cache_options": None}, None),
        (RESPONSES, {"diagnostics": {"previous_message_id": "msg_1"}}, None),
        (MESSAGES, {"diagnostics": {"previous_message_id": "msg_1"}}, "msg_1"),
    ],
)
def test_who_asks(api, body, asked):
    assert api.asked(JsonBody(json.dumps(body).encode()), Headers([])) == asked
    assert api.asked(JsonBody(b"{}"), Headers([(b"x-kvpin-compare-with", b"c")])) == "c"


@pytest.mark.parametrize(
    ("api", "body", "param"),
    [
        (CHATS, {"prompt_cache_options": "chatcmpl-1"}, "prompt_cache_options"),
        (MESSAGES, {"diagnostics": {"previous_message_id": {}}}, "diagnostics.previous_message_id"),
    ],
)
def test_a_question_of_another_type_is_refused(api, body, param):
    with pytest.raises(BadRequest, match=f"^{param} must be ") as caught:
        api.asked(JsonBody(json.dumps(body).encode()), Headers([]))
    assert caught.value.param == param


CREATED = b'event: response.created\ndata: {"type":"response.created","response":{"id":"resp_2"}}\n\n'
DELTA = b'event: d\r\ndata: {"delta":"say \\"response.completed\\" now"}\r\n\r\n'
DONE = (
    b'event: response.completed\ndata: {"type":"response.completed","response":'
    b'{"id":"resp_2","usage":{"input_tokens_details":{"cached_tokens":0}}}}\n\n'
)


class TestIds:
    """All bytes pass as they are."""

    def test_of_a_whole_answer(self):
        answer, world = b'{"output": [{"id": "fc_1"}],  "id" : "resp_2"}', World()
        world.whole(answer)
        assert (world.client.body, world.record.answer_id) == (answer, "resp_2")
        assert (b"content-length", b"9") in world.client.head[1]

    @pytest.mark.parametrize(
        "chunks",
        [
            (CREATED, DELTA[:9], DELTA[9:] + DONE),
            (b":\n\n", CREATED.replace(b"response.created", b"x")),
            (CREATED, DONE.replace(b"resp_2", b"resp_3"), b"data: [DONE]\n\n"),
        ],
    )
    def test_of_a_stream(self, chunks):
        world = World()
        world.streamed(*chunks)
        assert (world.client.chunks, world.record.answer_id) == ([*chunks, b""], "resp_2")
        assert world.stages[0].marks == ()  # a stream is long: nothing more is read


class TestWholeAnswers:
    def test_get_the_field(self):
        world = World(RESPONSES)
        usage = b'"usage":{"input_tokens":64,"input_tokens_details":{"cached_tokens":16}}'
        world.whole(b'{"id":"resp_2","x":1.50,%b}' % usage)
        assert (world.compared, world.client.head) == ([16], (200, [JSON]))
        assert b'"x":1.50' in world.client.body
        found = json.loads(world.client.body)["prompt_cache_diagnostics"]
        told = found["type"], found["reason"], found["cache_missed_tokens"]
        assert told == ("cache_miss", "tools_changed", 44)

    @pytest.mark.parametrize(
        ("status", "answer"), [(400, b'{"id": "x", "error": "no"}'), (200, b"not json"), (200, b"[1]")]
    )
    def test_errors_and_what_is_no_object_stay_as_they_are(self, status, answer):
        world = World(RESPONSES)
        world.whole(answer, status)
        assert world.client.body == answer


class TestStreams:
    def test_a_response_gets_the_field_in_its_last_event(self):
        world, stream = World(RESPONSES), CREATED + DELTA + DONE + b"data: [DONE]\n\n"
        world.streamed(*(stream[at : at + 7] for at in range(0, len(stream), 7)))
        body = world.client.body
        assert body.startswith(CREATED + DELTA + b"event: response.completed\ndata: {")
        assert body.endswith(b"}\n\ndata: [DONE]\n\n")
        (line,) = (line for line in body.splitlines() if b"cache_miss" in line)
        assert json.loads(line[6:])["response"]["prompt_cache_diagnostics"]["reason"] == "tools_changed"
        assert world.compared == [0]

    def test_a_chat_gets_it_in_the_chunk_with_the_usage(self):
        world = World(CHATS)
        text = b'data: {"id":"chatcmpl-2","choices":[{"delta":{"content":"usage"}}],"usage":null}\n\n'
        usage = b'"usage":{"prompt_tokens":64,"prompt_tokens_details":{"cached_tokens":16}}'
        world.streamed(text, b'data: {"choices":[],' + usage + b"}\n\n", b"data: [DONE]\n\n")
        first, last, end = world.client.body.split(b"\n\n")[:3]
        assert (first + b"\n\n", end, world.compared) == (text, b"data: [DONE]", [16])
        assert json.loads(last[5:])["prompt_cache_diagnostics"]["reason"] == "tools_changed"
        assert usage in last

    @pytest.mark.parametrize("diagnosis", [None, MISSED])
    def test_a_message_gets_it_in_its_first_event_when_nothing_is_counted(self, diagnosis):
        world = World(MESSAGES, diagnosis)
        message = b'{"id":"msg_2","usage":{"cache_read_input_tokens":0}}'
        world.streamed(b'data: {"type":"message_start","message":' + message + b"}\n\n", b"")
        reason = json.loads(world.client.body[6:])["message"]["diagnostics"]["cache_miss_reason"]["type"]
        assert reason == ("tools_changed" if diagnosis is not None else "previous_message_not_found")
        assert world.compared == ([None] if diagnosis is not None else [])

    @pytest.mark.parametrize(
        "event",
        [
            b'data: {"type":"response.completed"}\n\n',
            b'data: "response.completed"\n\n',
            b'data: {"type":"response.completed","response":[1]}\n\n',
            b': "response.completed"\n\n',
            b'data: {"type":"response.completed","response":{"id"',
        ],
    )
    def test_events_of_another_shape_stay_as_they_are(self, event):
        world = World(RESPONSES)
        world.streamed(event, b"")
        assert world.client.body == event


class TestCacheWrites:
    """`cache_write_tokens` in the usage of chats."""

    @pytest.mark.parametrize(
        ("details", "written"),
        [
            ({"cached_tokens": 16}, {"cached_tokens": 16, "cache_write_tokens": 32}),
            ({"created_cache_tokens": 3}, {"created_cache_tokens": 3, "cache_write_tokens": 3}),
            ({"cache_write_tokens": 0}, {"cache_write_tokens": 0}),
            (None, {"cache_write_tokens": 48}),
        ],
    )
    def test_of_a_whole_answer(self, details, written):
        usage = {"prompt_tokens": 50, "completion_tokens": 1, "prompt_tokens_details": details}
        answer = {"id": "c", "x": 1.5, "usage": usage}
        client = passed(writes_counted(lambda: 16), whole=json.dumps(answer).encode())
        assert json.loads(client.body) == {**answer, "usage": {**usage, "prompt_tokens_details": written}}

    @pytest.mark.parametrize(
        ("status", "answer"),
        [(200, b"no json"), (200, b'{"usage": 1}'), (400, b'{"usage": {"prompt_tokens": 50}}')],
    )
    def test_an_answer_without_usage_keeps_its_bytes(self, status, answer):
        client = passed(writes_counted(lambda: 16), whole=answer, status=status)
        assert (client.body, client.head) == (answer, (status, [JSON]))

    @pytest.mark.parametrize("rest", [b"", b"data:"])
    def test_of_the_event_of_a_stream_that_has_the_usage(self, rest):
        first, usage = b'data: {"id":  "c", "usage": null}\n\n', b'data: {"usage":{"prompt_tokens":50}}\n\n'
        end = b"data: [DONE]\n\n"
        client = passed(writes_counted(lambda: 16), chunks=[first, usage[:20], usage[20:] + end, rest])
        assert client.body.startswith(first)
        written = b'"prompt_tokens_details":{"cache_write_tokens":48}}}\n\n'
        assert client.body.endswith(written + end + rest)
