import json

import pytest

from engine_adapter import Headers, JsonBody
from proxy.core.differences import Difference, Kind
from proxy.core.misses import Compared, Diagnosis
from proxy.errors import BadRequest
from proxy.request.diagnostics import APIS, Diagnosed, IdNoted
from proxy.request.records import RequestRecord
from tests.proxy.request.passing import passed

RESPONSES, MESSAGES = APIS["/v1/responses"], APIS["/v1/messages"]
CHATS = APIS["/v1/chat/completions"]
MISSED = Diagnosis(
    n_tokens=64,
    compared=Compared(
        request_id="r1", n_tokens=50, common_tokens=20, repeated_tokens=40,
        difference=Difference(Kind.TOOLS, "tools"),
    ),
)  # fmt: skip


class World:
    """A client behind the diagnostics, the ids that were noted, and what was asked about them."""

    def __init__(self, api, asked, diagnosis=MISSED):
        self.compared = []
        self.record = RequestRecord("r", 0.0, "/v1/x", None, None, stream=False)
        self.stages = [IdNoted(self.record)]
        if asked is not None:
            self.stages.insert(0, Diagnosed(api))

            def diagnose(reused):
                self.compared.append(reused)
                return diagnosis

            self.stages[0].diagnose = diagnose if diagnosis is not None else None

    @property
    def ids(self):
        return [self.record.answer_id] if self.record.answer_id is not None else []

    def json(self, answer, status=200):
        self.client = passed(*self.stages, whole=answer, status=status)

    def stream(self, *chunks):
        self.client = passed(*self.stages, chunks=chunks)


@pytest.mark.parametrize(
    ("api", "body", "asked"),
    [
        (RESPONSES, {"prompt_cache_options": {"comparison_response_id": "resp_1"}}, "resp_1"),
        (RESPONSES, {"prompt_cache_options": {"comparison_response_id": None}}, None),
        (RESPONSES, {"prompt_cache_options": None}, None),
        (RESPONSES, {"diagnostics": {"previous_message_id": "msg_1"}}, None),
        (MESSAGES, {"diagnostics": {"previous_message_id": "msg_1"}}, "msg_1"),
        (MESSAGES, {"diagnostics": {"previous_message_id": None}}, None),
        (MESSAGES, {}, None),
    ],
)
def test_who_asks(api, body, asked):
    assert api.asked(JsonBody(json.dumps(body).encode()), Headers([])) == asked


@pytest.mark.parametrize(
    ("api", "body", "param"),
    [
        (CHATS, {"prompt_cache_options": "chatcmpl-1"}, "prompt_cache_options"),
        (
            RESPONSES,
            {"prompt_cache_options": {"comparison_response_id": 5}},
            "prompt_cache_options.comparison_response_id",
        ),
        (MESSAGES, {"diagnostics": ["msg_1"]}, "diagnostics"),
        (MESSAGES, {"diagnostics": {"previous_message_id": {}}}, "diagnostics.previous_message_id"),
    ],
)
def test_a_question_of_another_type_is_refused(api, body, param):
    with pytest.raises(BadRequest, match=f"^{param} must be ") as caught:
        api.asked(JsonBody(json.dumps(body).encode()), Headers([]))
    assert caught.value.param == param


@pytest.mark.parametrize("api", APIS.values())
def test_a_header_asks_too(api):
    headers = Headers([(b"x-kvpin-compare-with", b"chatcmpl-1")])
    assert api.asked(JsonBody(b"{}"), headers) == "chatcmpl-1"


def test_nothing_more_is_read_once_the_id_is_known():
    """A stream is long, and its first chunk has the id."""
    world = World(CHATS, None)
    world.stream(b'data: {"id": "chatcmpl-1"}\n\n', b'data: {"id": "chatcmpl-2"}\n\n', b"data: [DONE]\n\n")
    assert world.ids == ["chatcmpl-1"]
    assert world.stages[0].marks == ()
    assert world.client.body.endswith(b"[DONE]\n\n")


def test_the_id_may_come_with_the_last_chunk_of_a_stream():
    world = World(CHATS, None)
    world.stream(b":\n\n", b'data: {"id": "chatcmpl-1"}\n\ndata: [DONE]\n\n')
    assert world.ids == ["chatcmpl-1"]


class TestWholeAnswers:
    def test_keep_their_bytes_unless_asked(self):
        answer = b'{"output": [{"id": "fc_1"}],  "id" : "resp_2"}'
        world = World(RESPONSES, None)
        world.json(answer)
        assert (world.client.body, world.ids, world.compared) == (answer, ["resp_2"], [])
        assert (b"content-length", b"9") in world.client.head[1]

    def test_get_the_field(self):
        world = World(RESPONSES, "resp_1")
        world.json(
            b'{"id":"resp_2","x":1.50,"usage":{"input_tokens":64,"input_tokens_details":{"cached_tokens":16}}}'
        )
        assert world.compared == [16]
        assert b'"x":1.50' in world.client.body
        found = json.loads(world.client.body)["prompt_cache_diagnostics"]
        assert (found["type"], found["reason"], found["cache_missed_tokens"]) == (
            "cache_miss",
            "tools_changed",
            44,
        )
        assert world.client.head == (200, [(b"content-type", b"application/json")])

    def test_without_a_divergence_the_field_is_null(self):
        world = World(MESSAGES, "msg_1", Diagnosis(n_tokens=64, reused_tokens=63))
        world.json(b'{"id":"msg_2","usage":{"cache_read_input_tokens":0}}')
        assert json.loads(world.client.body)["diagnostics"] is None
        assert world.compared == [0]

    @pytest.mark.parametrize("answer", [b'{"id": "x", "error": "no"}', b"not json", b"[1]"])
    def test_errors_stay_as_they_are(self, answer):
        world = World(RESPONSES, "resp_1")
        world.json(answer, status=400)
        assert (world.client.body, world.ids) == (answer, [])

    def test_what_is_no_object_stays_as_it_is(self):
        world = World(RESPONSES, "resp_1")
        world.json(b"[1]")
        assert (world.client.body, world.ids) == (b"[1]", [])


CREATED = b'event: response.created\ndata: {"type":"response.created","response":{"id":"resp_2"}}\n\n'
DELTA = b'event: d\r\ndata: {"delta":"say \\"response.completed\\" now"}\r\n\r\n'
DONE = (
    b'event: response.completed\ndata: {"type":"response.completed","response":'
    b'{"id":"resp_2","usage":{"input_tokens_details":{"cached_tokens":0}}}}\n\n'
)


class TestStreams:
    def test_keep_their_chunks_unless_asked(self):
        world = World(RESPONSES, None)
        world.stream(CREATED, DELTA[:9], DELTA[9:] + DONE)
        assert world.client.chunks == [CREATED, DELTA[:9], DELTA[9:] + DONE, b""]
        assert world.ids == ["resp_2"]

    def test_a_response_gets_the_field_in_its_last_event(self):
        world = World(RESPONSES, "resp_1")
        stream = CREATED + DELTA + DONE + b"data: [DONE]\n\n"
        world.stream(*(stream[at : at + 7] for at in range(0, len(stream), 7)))
        body = world.client.body
        assert body.startswith(CREATED + DELTA + b"event: response.completed\ndata: {")
        assert body.endswith(b"}\n\ndata: [DONE]\n\n")
        (line,) = (line for line in body.splitlines() if b"cache_miss" in line)
        assert json.loads(line[6:])["response"]["prompt_cache_diagnostics"]["reason"] == "tools_changed"
        assert world.compared == [0]

    def test_a_chat_gets_it_in_the_chunk_with_the_usage(self):
        world = World(CHATS, "chatcmpl-1")
        text = b'data: {"id":"chatcmpl-2","choices":[{"delta":{"content":"usage"}}],"usage":null}\n\n'
        usage = b'"usage":{"prompt_tokens":64,"prompt_tokens_details":{"cached_tokens":16}}'
        world.stream(text, b'data: {"choices":[],' + usage + b"}\n\n", b"data: [DONE]\n\n")
        assert (world.ids, world.compared) == (["chatcmpl-2"], [16])
        first, last, end = world.client.body.split(b"\n\n")[:3]
        assert (first + b"\n\n", end) == (text, b"data: [DONE]")
        assert (
            json.loads(last.removeprefix(b"data:"))["prompt_cache_diagnostics"]["reason"] == "tools_changed"
        )
        assert usage in last

    def test_a_message_gets_it_in_its_first_event_when_nothing_is_counted(self):
        world = World(MESSAGES, "msg_1", None)
        message = b'{"id":"msg_2","usage":{"cache_read_input_tokens":0}}'
        world.stream(b'data: {"type":"message_start","message":' + message + b"}\n\n", b"")
        found = json.loads(world.client.body[6:])["message"]["diagnostics"]
        assert found == {"cache_miss_reason": {"type": "previous_message_not_found"}}
        assert world.compared == []  # no answer of that id is known

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
        world = World(RESPONSES, "resp_1")
        world.stream(event, b"")
        assert world.client.body == event
