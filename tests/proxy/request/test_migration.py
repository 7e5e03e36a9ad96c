"""Streams whose engine dies in mid-answer, over real sockets: which go on, and which end. The rest
of a stream joined to what its client has."""

import json
from array import array
from dataclasses import replace
from typing import ClassVar

import httpx
import pytest

from engine_adapter import EngineDiverged, Hold, Resumption
from engine_adapter.torch_engine.adapter import ToldTokens
from proxy.request.migration import SentStream, Splice, Transcript, read_chunk
from tests.fakes import CHAT, DONE, STREAM, FakeAdapter, client_of, event, proxy_over
from tests.holding import HoldingAdapter
from tests.scripts import dies, streams

GREEDY = {**STREAM, "temperature": 0}
WORDS = ["One", " two", " three", " four", " five"]


def chunk(delta, answer="1", finish=None, **more):
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return event({"id": answer, "created": int(answer), "model": "m", "choices": [choice], **more})


def whole(answer="1", words=WORDS):
    """A stream's chunks: the role, the text, the end."""
    role = chunk({"role": "assistant", "content": ""}, answer)
    return [role, *(chunk({"content": word}, answer) for word in words), chunk({}, answer, "stop"), DONE]


def compact(part):
    """An event in the bytes of kvpin's encoder."""
    return event(0).replace(b"0", json.dumps(json.loads(part[6:]), separators=(",", ":")).encode())


@pytest.fixture
async def proxy(engine, other):
    async with proxy_over(engine, other) as proxy:
        yield proxy
        await proxy.settled()
        assert proxy.flow.attempts.room.used == 0


async def broken(client, body=GREEDY):
    got = b""
    async with client.stream("POST", CHAT, json=body) as response:
        with pytest.raises(httpx.RemoteProtocolError):  # noqa: PT012 - the loop is what breaks
            async for part in response.aiter_raw():
                got += part
    return got


class TestAgain:
    """Greedy requests run again; what was sent is left out."""

    @pytest.mark.parametrize("sent", range(7))
    @pytest.mark.parametrize(
        "words", [WORDS, ["One tw", "o three four", " five"]], ids=["same", "other cuts"]
    )
    async def test_the_client_sees_one_stream(self, engine, other, client, sent, words):
        engine.script = dies(*whole()[:sent], abort=sent == 2)
        other.script = streams(*whole("2", words))
        response = await client.post(CHAT, json=GREEDY)
        assert other.seen[0].body == engine.seen[0].body
        chunks = [json.loads(line[6:]) for line in response.text.split("\n\n")[:-2]]
        deltas = [part["choices"][0]["delta"] for part in chunks]
        assert "".join(delta.get("content") or "" for delta in deltas) == "".join(WORDS)
        assert [delta["role"] for delta in deltas if "role" in delta] == ["assistant"]
        assert len({(part["id"], part["created"]) for part in chunks}) == 1
        *reasons, last = [part["choices"][0]["finish_reason"] for part in chunks]
        assert (set(reasons), last) == ({None}, "stop")
        assert response.text.endswith("data: [DONE]\n\n")
        record = client.proxy.last
        assert (record.attempts, record.status, record.error) == (["a", "b"], 200, None)
        assert record.interrupted == (sent > 0)
        page = client.proxy.metrics.render().decode()
        assert ('kvpin_interrupted_streams_total{model="m",result="migrated"} 1.0' in page) == (sent > 0)

    async def test_after_a_comment_the_next_engine_says_the_first_token(self, engine, other, client):
        engine.script = dies(b":\n\n")
        other.script = streams(*whole("2"))
        response = await client.post(CHAT, json=GREEDY)
        assert response.text.count("data:") == len(whole())
        record = client.proxy.last
        assert record.attempts == ["a", "b"]
        assert record.first_byte_s is not None
        assert record.moments.has_failed

    @pytest.mark.parametrize(
        "answer", [whole("2", ["One"]), [event({"error": {"message": "no"}}), DONE]], ids=["shorter", "error"]
    )
    async def test_another_answer_ends_it(self, engine, other, client, answer):
        engine.script = dies(*whole()[:4])
        other.script = streams(*answer)
        got = await broken(client)
        assert got.startswith(b"".join(whole()[:4]))
        assert b"gave another one" in got
        assert client.proxy.last.error
        assert 'result="broken"} 1.0' in client.proxy.metrics.render().decode()


class TestOnward:
    """An engine that takes tokens goes on after them, also with sampled answers."""

    ASK: ClassVar = {"model": "m", "prompt": list(range(40)), "stream": True}
    TOLD: ClassVar = Resumption(array("i", range(40, 60)), {"answer_token_ids": [40, 41]})

    def text(self, text, answer="1", **more):
        choice = {"index": 0, "text": text, "finish_reason": None, **more}
        return event({"id": answer, "choices": [choice]})

    async def test_the_answer_is_part_of_the_prompt(self, engine, other):
        def make(body):
            return Hold(body, resume=lambda: self.TOLD)

        engine.script = dies(self.text("One"), self.text(" two"))
        last = self.text("", "2", finish_reason="length")
        other.script = streams(self.text(" three", "2"), last, DONE)
        adapters = HoldingAdapter(engine, make), HoldingAdapter(other, make)
        async with proxy_over(*adapters, reuse=True) as proxy, client_of(proxy) as client:
            response = await client.post("/v1/completions", json=self.ASK)
            assert other.seen[0].json == self.ASK | self.TOLD.fields
            sent = [self.text("One"), self.text(" two"), self.text(" three")]
            sent.append(self.text("", finish_reason="length"))
            assert response.content == b"".join([*sent[:2], *map(compact, sent[2:]), DONE])
            record = proxy.last
            assert (len(record.prompt.token_ids), record.placement.n_tokens) == (40, 60)
            assert (record.attempts, record.error, record.interrupted) == (["a", "b"], None, 1)
            assert (record.died, record.expected_first_token_s) == (["a"], None)
            assert 0 < record.answered_s <= record.duration_s
            await proxy.settled()

    async def test_a_reader_of_all_events_reads_those_after_the_head(self, engine, other):
        def make(body):
            told = ToldTokens()
            return Hold(body, answer=told, resume=told.resume)

        said = [b": %d\n" % number + self.text(word) for number, word in enumerate(WORDS, 40)]
        engine.script = dies(*said, pause_s=0.01)
        other.script = streams(self.text("", "2", finish_reason="length"), DONE)
        adapters = HoldingAdapter(engine, make), HoldingAdapter(other, make)
        async with proxy_over(*adapters, reuse=True) as proxy, client_of(proxy) as client:
            response = await client.post("/v1/completions", json=self.ASK)
            assert response.content.startswith(b"".join(map(self.text, WORDS)))
            assert other.seen[0].json["answer_token_ids"] == [40, 41, 42, 43, 44]

    async def test_another_kind_of_engine_cannot(self, engine, other):
        engine.script = dies(self.text("One"))
        holding = HoldingAdapter(engine, lambda body: Hold(body, resume=lambda: self.TOLD))
        stranger = FakeAdapter(other.id, other.url)
        stranger.spec = replace(stranger.spec, kind="vllm")
        async with proxy_over(holding, stranger, reuse=True) as proxy, client_of(proxy) as client:
            with pytest.raises(httpx.RemoteProtocolError):
                await client.post("/v1/completions", json=self.ASK)
            assert not other.seen


class TestNotAgain:
    @pytest.mark.parametrize(
        ("body", "chunks"),
        [
            (STREAM, whole()[:3]),
            (GREEDY, [*whole()[:3], chunk({"tool_calls": [{"index": 0}]})]),
            (GREEDY, [chunk({"content": "One"}), event({"choices": [{"logprobs": {"a": 1}}]})]),
            (GREEDY, [*whole()[:3], event({"choices": [{"index": 1, "delta": {"content": "x"}}]})]),
            (GREEDY, [event({"choices": [{}, {}]})]),
            (GREEDY, [b"data: odd\n\n"]),
        ],
        ids=["sampled", "tool call", "logprobs", "second choice", "two choices", "unreadable"],
    )
    async def test_it_ends_with_an_error(self, engine, other, client, body, chunks):
        engine.script = dies(*chunks)
        got = await broken(client, body)
        assert got.startswith(b"".join(chunks))
        error = json.loads(got.rpartition(b"data: ")[2])["error"]
        assert (error["type"], "stopped in mid-answer" in error["message"]) == ("server_error", True)
        assert not other.seen
        assert client.proxy.last.interrupted == 1
        assert client.proxy.last.error == error["message"]
        assert client.proxy.fleet.engines["a"].state == "suspect"


async def test_bodies_have_limited_room(engine, other, client):
    client.proxy.flow.attempts.room.limit = 10
    engine.script = dies(*whole()[:3])
    assert b"stopped in mid-answer" in await broken(client)
    assert not other.seen


def spliced(sent, rest, *, again, cached=None):
    transcript = Transcript(keeps_text=True)
    for part in sent:
        transcript.feed(part)
    transcript.read()
    resumption = None if again else Resumption(array("i", [1]), {})
    told = SentStream("k", transcript.head, transcript.has_role, transcript.texts, resumption, cached)
    splice = Splice(told)
    got = b"".join(map(splice.feed, rest))
    return [json.loads(part[6:]) if b"{" in part else part for part in got.split(b"\n\n")[:-1]]


def deltas(chunks):
    return [part["choices"][0]["delta"] for part in chunks]


ROLE = {"role": "assistant", "content": None}


def test_what_was_sent_before_the_role_is_kept():
    assert deltas(spliced([], [chunk(ROLE, "2")], again=True)) == [ROLE]
    first = chunk({**ROLE, "content": "One"}, "2")
    assert deltas(spliced([chunk(ROLE)], [first], again=True)) == [{"content": "One"}]


def test_a_seam_inside_a_chunk_and_between_fields():
    sent = [chunk(ROLE), chunk({"reasoning_content": "Hm"}), chunk({"content": "On"})]
    rest = [
        chunk({"role": "assistant", "reasoning_content": "H"}, "2"),
        chunk({"reasoning_content": "m"}, "2"),
        event({"id": "2", "choices": []}),
        b": comment\n\n",
        chunk({"content": "One two"}, "2"),
    ]
    assert deltas(spliced(sent, rest, again=True)) == [{"content": "e two"}]


@pytest.mark.parametrize(
    "other",
    [
        chunk({"content": "Ona"}, "2"),
        chunk({"reasoning_content": "One"}, "2"),
        chunk({"content": "On", "tool_calls": [1]}, "2"),
        DONE,
    ],
    ids=["other text", "a thought", "a call", "too early an end"],
)
def test_another_answer_is_refused(other):
    with pytest.raises(EngineDiverged, match="another one"):
        spliced([chunk(ROLE), chunk({"content": "One"})], [other], again=True)


@pytest.mark.parametrize("details", [{"prompt_tokens_details": {"cached_tokens": 99}}, {}])
def test_the_usage_tells_what_the_first_engine_reused(details):
    last = chunk({}, "2", usage={"completion_tokens": 9, **details})
    (part,) = spliced([], [last], again=False, cached=32)
    told = {"prompt_tokens_details": {"cached_tokens": 32}} if details else {}
    assert part["usage"] == {"completion_tokens": 9, **told}


def piece(delta, **choice):
    return event(
        {"id": "1", "object": "o", "choices": [{"index": 0, "delta": delta, **choice}], "usage": None}
    )


PARTS = [
    b": comment\n\n",
    piece({"role": "assistant", "content": ""}),
    piece({"reasoning_content": "Hm"}),
    piece({"reasoning_content": "m"}, finish_reason=None, logprobs=None),
    piece({"content": "żó"}),
    piece({"content": "ł\n\nw", "tool_calls": []}),
]
TEXTS = [("reasoning_content", "Hmm"), ("content", "żół\n\nw")]


@pytest.mark.parametrize("at_once", [1, 2, 100])
@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_any_number_of_events_at_once_gives_the_same(at_once, end):
    parts = [each.replace(b"\n\n", end) for each in PARTS]
    sent = Transcript(keeps_text=True)
    for at in range(0, len(parts), at_once):
        part = b"".join(parts[at : at + at_once])
        assert sent.feed(part) == part
    sent.read()
    assert (list(sent.texts), sent.has_role, sent.is_plain) == (TEXTS, True, True)
    assert set(sent.head) == {"id", "object"}


def test_a_completion_has_its_text_in_the_choice():
    sent = Transcript(keeps_text=True)
    sent.feed(event({"id": "1", "choices": [{"index": 0, "text": "One", "logprobs": None}]}))
    sent.read()
    assert (sent.texts, sent.is_plain) == ((("text", "One"),), True)


def test_too_long_a_text_is_given_up():
    sent = Transcript(keeps_text=True)
    for _ in range(40):
        sent.feed(piece({"content": "x" * 40_000}))
    assert not sent.is_plain
    assert len(sent.texts[0][1]) < 1_200_000


@pytest.mark.parametrize("last", [event({"error": {}}), piece({}, finish_reason="stop").replace(b": ", b":")])
def test_without_its_text_a_stream_must_not_have_ended(last):
    sent = Transcript(keeps_text=False)
    for part in PARTS:
        assert sent.feed(part) == part
    assert (sent.is_plain, sent.texts, sent.has_role, bool(sent.head)) == (True, (), True, True)
    assert sent.feed(last) == last
    assert not sent.is_plain


def test_other_events():
    assert read_chunk(DONE) is None
    assert read_chunk(b"event: ping\n\n") is None
    assert read_chunk(event({"choices": [{}, {}]})) is None
    assert read_chunk(event({"usage": {}})).choice is None
    assert read_chunk(event({"choices": None, "usage": {}})).choice is None
