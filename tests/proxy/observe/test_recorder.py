import asyncio
import fcntl
import json
import os
import resource
import signal
import stat
from array import array
from hashlib import blake2b

import msgspec
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from proxy.core.placement.decision import Cost
from proxy.core.placement.load import LoadSample, Work
from proxy.observe import recorder as module
from proxy.observe.recorder import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    EngineWatch,
    Hasher,
    Recorder,
    client_of,
    line_of,
    seconds_per_token,
    text_blocks,
)
from proxy.prompt import Prompt
from proxy.replay.trace import ALL, RecordedEngine, TraceError, read_trace
from proxy.request.calls import Session
from proxy.request.records import RequestRecord
from proxy.settings import SettingsError
from tests.kv_world import KvFake, kv_world
from tests.placements import placement_of

ROOM = 1 << 20


def prompt_of(ids, extra_ids=None, salt=None, lora=None):
    extras = array("Q", extra_ids) if extra_ids is not None else None
    return Prompt(array("i", ids), extras, salt, lora)


def record(ids=range(200), **fields):
    prompt = ids if isinstance(ids, Prompt) or ids is None else prompt_of(ids)
    defaults = {"served_as": "m", "prompt": prompt, "status": 200, "duration_s": 0.25}
    return RequestRecord("r", 0.0, "/v1/x", "m", None, **{"stream": True} | defaults | fields)


async def recorded(path, *records, max_bytes=ROOM):
    """Those records written to a file; the recorder, closed."""
    recorder = Recorder(path, max_bytes)
    for each in records:
        recorder.observe(each)
    await recorder.aclose()
    return recorder


def all_lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def lines_of(path):
    """Those of requests."""
    return [line for line in all_lines_of(path) if "recording" not in line]


def abouts_of(path):
    return [line["recording"] for line in all_lines_of(path) if "recording" in line]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "traffic.jsonl"


CHAT = {"messages": [{"role": "user", "content": "a tide table, " * 40}]}


class TestText:
    def text_of(self, body, route="/v1/chat/completions", hasher=None, *, is_system_first=False, **fields):
        told = RequestRecord("r", 0.0, route, "m", None, True, prompt=prompt_of(range(9)), **fields)
        raw = json.dumps(body).encode()
        return (hasher or Hasher()).text(told, told.prompt, raw, is_system_first=is_system_first)

    def test_it_is_hashed_by_the_key_of_the_recording_and_the_namespace(self):
        one = Hasher()
        ids = self.text_of(CHAT, hasher=one).ids
        assert len(ids) == 2
        assert self.text_of(CHAT, hasher=one).ids == ids
        assert self.text_of(CHAT, hasher=one, served_as="n").ids != ids
        assert self.text_of(CHAT).ids != ids

    @pytest.mark.parametrize(
        ("body", "route"),
        [(CHAT, "/v1/completions"), ({"previous_response_id": "resp_1", "input": "Hi"}, "/v1/responses")],
    )
    def test_a_body_without_all_of_the_prompt_has_none(self, body, route):
        assert self.text_of(body, route) is None

    async def test_the_file_holds_no_text(self, path):
        recorder = Recorder(path, ROOM)
        recorder.observe(record(), json.dumps(CHAT).encode())
        told = RequestRecord("r", 0.0, "/v1/chat/completions", "m", None, True, prompt=prompt_of(range(9)))
        recorder.observe(told, json.dumps(CHAT).encode())
        await recorder.aclose()
        (without, line) = lines_of(path)
        assert "text" not in without
        assert line["text"].keys() == {"ids"}
        assert b"tide" not in path.read_bytes()


@pytest.mark.parametrize(
    ("user_agent", "name"),
    [
        ("QwenCode/0.15.10 (linux; x64)", "QwenCode"),
        ("OpenAI/JS 5.0.1", "OpenAI/JS"),
        ("pi", "pi"),
        ("", None),
        ("x" * 99, "x" * 64),
    ],
)
def test_the_name_of_a_client(user_agent, name):
    assert client_of(user_agent) == name


IDS = st.lists(st.integers(0, 9), max_size=400)


class TestHasher:
    @given(IDS, IDS, st.integers(0, 400))
    def test_prompts_share_the_ids_of_the_full_blocks_they_share(self, one, other, common):
        other = one[:common] + other
        same = next((at for at, pair in enumerate(zip(one, other, strict=False)) if len(set(pair)) > 1), None)
        same = min(len(one), len(other)) if same is None else same
        hasher = Hasher()
        a, b = (hasher.block_ids("m", prompt_of(ids)) for ids in (one, other))
        assert (len(a), len(b)) == (len(one) // BLOCK_TOKENS, len(other) // BLOCK_TOKENS)
        shared = same // BLOCK_TOKENS
        assert a[:shared] == b[:shared]
        assert not set(a[shared:]) & set(b[shared:])
        assert all(0 <= each < 1 << 64 for each in a)

    @pytest.mark.parametrize("fields", [{"salt": "s"}, {"lora": "s"}, {"salt": "s", "lora": "t"}])
    def test_nothing_is_shared_over_namespaces_and_keys(self, fields):
        hasher, ids = Hasher(), range(300)
        alike = hasher.block_ids("m", prompt_of(ids))
        assert alike == hasher.block_ids("m", prompt_of(ids)) != Hasher().block_ids("m", prompt_of(ids))
        for model, prompt in (("m", prompt_of(ids, **fields)), ("s", prompt_of(ids))):
            assert not set(alike) & set(hasher.block_ids(model, prompt))

    def test_extra_ids_count_and_zeros_are_text(self):
        hasher, ids = Hasher(), range(192)
        text = hasher.block_ids("m", prompt_of(ids))
        assert hasher.block_ids("m", prompt_of(ids, [0] * 192)) == text
        cat, dog = (hasher.block_ids("m", prompt_of(ids, [0] * 64 + [image] * 128)) for image in (1, 2))
        assert cat[0] == dog[0] == text[0]
        assert len({cat[1], dog[1], text[1], cat[2], dog[2], text[2]}) == 6

    def test_sessions_are_a_tenants_own(self):
        hasher = Hasher()
        assert hasher.session_id(Session("t", "chat")) == hasher.session_id(Session("t", "chat"))
        others = (("t", "c"), ("u", "c"), (None, "c"), ("t", "d"))
        assert len({hasher.session_id(Session(*each)) for each in others}) == 4

    def test_tenants_are_told_as_hashes_and_only_where_that_is_wanted(self):
        acme = record()
        acme.tenant = "acme"
        assert line_of(Hasher(), 0, acme, acme.prompt).tenant is None
        one, other = (Hasher(secret, tells_tenants=True) for secret in ("s", "t"))
        told = line_of(one, 0, acme, acme.prompt).tenant
        assert told == one.tenant_id("acme") != other.tenant_id("acme")
        assert len({told, one.tenant_id("globex"), one.tenant_id(None)}) == 3
        assert b"acme" not in msgspec.json.encode(line_of(one, 0, acme, acme.prompt))


def test_a_line_has_what_replay_reads_and_what_else_is_known():
    placement = placement_of("e1", 64, 200, (Cost("e1"),), "lowest cost")
    answered = {"reported_tokens": 64, "output_tokens": 7, "events": 9}
    told = record(placement=placement, first_byte_s=0.0125, queued_s=0.25, **answered)
    line = msgspec.to_builtins(line_of(Hasher(), 1.5, told, told.prompt))
    assert len(line.pop("hash_ids")) == 3
    assert line == {
        "timestamp": 1500.0, "input_length": 200, "output_length": 7, "block_tokens": 64, "model": "m",
        "engine": "e1", "status": 200, "cached_tokens": 64, "ttft_ms": 12.5,
        "queued_ms": 250.0,
    }  # fmt: skip
    silent = record(events=9)
    line = line_of(Hasher(), 0.0, silent, silent.prompt)
    assert (line.output_length, line.counted) == (9, True)  # events, where the engine does not tell


class TestRecording:
    async def test_replay_reads_what_was_written(self, path):
        shared = list(range(1000, 1128))
        await recorded(
            path,
            record([*shared, *range(100)], output_tokens=5, session=Session(None, "a"), duration_s=0.0),
            record([*shared, *range(50, 150)], duration_s=0.0),
            record(prompt_of(shared, salt="s"), duration_s=0.0),
        )
        trace = read_trace(path)
        first, second, other = trace.requests
        assert (trace.tokens_per_block, trace.common_blocks, trace.rechained) == (64, 0, False)
        assert [r.n_tokens for r in trace.requests] == [228, 228, 128]
        assert first.chain.hashes[:2] == second.chain.hashes[:2]
        assert first.chain.hashes[2] != second.chain.hashes[2]
        assert not set(first.chain.hashes) & set(other.chain.hashes)
        assert (first.output_tokens, first.session is None, second.session) == (5, False, None)

    async def test_arrivals_are_what_counts_and_never_before_the_recording(self, path):
        await recorded(path, record(duration_s=1000.0))
        assert lines_of(path)[0]["timestamp"] == 0

    async def test_prompts_that_are_not_known_whole_are_left_out_and_counted(self, path):
        in_part = replace(prompt_of(range(100)), whole=False)
        with structlog.testing.capture_logs() as logs:
            await recorded(path, record(None), record(in_part), record([]), record([1]))
        assert [line["input_length"] for line in lines_of(path)] == [1]
        (said,) = logs
        assert (said["requests"], said["prompt_unknown"], said["file"]) == (1, 3, str(path))

    async def test_it_is_written_while_requests_go_on(self, path, monkeypatch):
        monkeypatch.setattr(module, "WRITE_S", 0.001)
        recorder = Recorder(path, ROOM)
        running = asyncio.create_task(recorder.run())
        recorder.observe(record())
        async with asyncio.timeout(5):
            while not path.stat().st_size:  # noqa: ASYNC110 - the disk has no event
                await asyncio.sleep(0.001)
        running.cancel()
        await recorder.aclose()
        assert len(lines_of(path)) == 1


class TestAbout:
    """The lines about the recording itself."""

    async def test_the_first_and_the_last_line_tell_the_engines_as_they_are_then(self, path):
        known = []
        recorder = Recorder(path, ROOM, lambda: list(known))
        await recorder.write()
        assert path.stat().st_size == 0  # the next start may use the file
        recorder.observe(record())
        await recorder.write()
        known.append(RecordedEngine("e", model="m", prefill=((100.0, 0.5),), samples=3))
        recorder.observe(record(None))
        await recorder.write()
        await recorder.aclose()
        first, last = abouts_of(path)
        assert [next(iter(line)) for line in all_lines_of(path)] == ["recording", "timestamp", "recording"]
        assert (first["unrecorded"], first["engines"]) == (0, [])
        assert last["unrecorded"] == 1
        assert last["engines"] == [{"id": "e", "model": "m", "prefill": [[100.0, 0.5]], "samples": 3}]
        assert read_trace(path).figures.prefill == ((100.0, 0.5),)

    async def test_recordings_of_one_secret_alone_are_merged_by_time(self, tmp_path):
        paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
        for path in paths:
            recorder = Recorder(path, ROOM, secret="shared by both")
            recorder.observe(record(duration_s=0.0))
            await recorder.aclose()
        trace = read_trace(*reversed(paths))
        assert trace.name == "b.jsonl and 1 more"
        one, other = trace.requests
        assert one.chain.hashes == other.chain.hashes
        assert one.at < other.at
        await recorded(tmp_path / "c.jsonl", record())
        with pytest.raises(TraceError, match="record_traffic_key"):
            read_trace(paths[0], tmp_path / "c.jsonl")
        assert "shared" not in paths[0].read_text()


class TestFile:
    async def test_it_is_for_this_user_alone(self, path):
        path.touch(0o644)
        await recorded(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600

    async def test_an_earlier_recording_is_not_touched(self, path):
        for n, name in enumerate(("traffic.jsonl", "traffic-1.jsonl", "traffic-2.jsonl"), 1):
            assert (await recorded(path, record([1] * n))).path.name == name
        lengths = [lines_of(each)[0]["input_length"] for each in path.parent.iterdir()]
        assert sorted(lengths) == [1, 2, 3]

    async def test_one_that_another_kvpin_writes_is_not_shared(self, path):
        with path.open("wb") as theirs:
            fcntl.flock(theirs, fcntl.LOCK_EX)
            assert (await recorded(path)).path.name == "traffic-1.jsonl"

    @pytest.mark.parametrize(
        ("name", "make", "why"),
        [
            ("none/t.jsonl", None, "No such file or directory"),
            ("dir", os.mkdir, "Is a directory"),
            ("pipe", os.mkfifo, "No such device or address"),
            ("null", lambda path: path.symlink_to("/dev/null"), "it is not a regular file"),
        ],
    )
    def test_where_nothing_can_be_written_is_said_at_once(self, tmp_path, name, make, why):
        path = tmp_path / name
        if make is not None:
            make(path)
        with pytest.raises(SettingsError) as caught:
            Recorder(path, ROOM)
        assert str(caught.value) == f"record_traffic: {str(path)!r} cannot be written: {why}"


class TestEnd:
    async def test_a_full_one_ends_with_a_whole_line(self, path):
        with structlog.testing.capture_logs() as logs:
            await recorded(path, record(), record(), record(), max_bytes=500)
        assert len(lines_of(path)) == 2
        assert path.stat().st_size <= 500
        assert logs[0]["log_level"] == "warning"
        assert logs[0]["why"] == "the file has reached record_traffic_bytes, 500"
        assert logs[1]["requests"] == 2

    async def test_it_takes_no_more_room_than_there_is(self, path):
        await recorded(path, record(), max_bytes=150)
        assert path.stat().st_size <= 150

    async def test_a_disk_that_is_full_ends_it_and_no_request(self, path):
        recorder = Recorder(path, ROOM)
        recorder.observe(record())
        await recorder.write()
        size = path.stat().st_size
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, before[1]))
        try:
            recorder.observe(record())
            with structlog.testing.capture_logs() as logs:
                await recorder.write()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handler)
        assert [log["why"] for log in logs] == ["the file cannot be written: File too large"]
        assert path.stat().st_size == size  # the ten bytes there was room for are gone again
        recorder.observe(record())
        await recorder.aclose()
        assert len(lines_of(path)) == 1

    async def test_a_disk_that_hangs_does_not_fill_the_memory(self, path, monkeypatch):
        monkeypatch.setattr(module, "MAX_WAITING_TOKENS", 500)
        recorder = Recorder(path, ROOM)
        for _ in range(2):
            recorder.observe(record())
        await recorder.write()
        with structlog.testing.capture_logs() as logs:
            for _ in range(4):
                recorder.observe(record())
        assert [log["why"] for log in logs] == ["the disk is too slow for the traffic"]
        await recorder.aclose()
        assert len(lines_of(path)) == 2


def streamed(**fields):
    known = {"arrived": 10.0, "placed": 10.5, "first_byte_s": 1.5, "answered_s": 4.0, "output_tokens": 11}
    return RequestRecord("r", 0.0, "/v1/x", "m", None, **{"stream": True} | known | fields)


def test_the_pace_of_a_stream_is_that_after_its_first_token():
    assert seconds_per_token(streamed()) == pytest.approx(0.2)


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": False},
        {"error": "the engine died"},
        {"died": ["e"]},
        {"placed": None},
        {"first_byte_s": None},
        {"answered_s": None},
        {"output_tokens": None},
        {"output_tokens": 7},
    ],
)
def test_other_answers_tell_no_pace(fields):
    assert seconds_per_token(streamed(**fields)) is None


async def test_what_engines_told_and_what_was_measured(tokenizer_dir):
    async with kv_world(tokenizer_dir) as world:
        world.add(KvFake("a"))
        watch = EngineWatch(world.fleet)
        (unmeasured,) = watch.engines()
        assert (unmeasured.id, unmeasured.model, unmeasured.gpu_tokens) == ("a", "m", 64 * 16)
        assert (unmeasured.prefill, unmeasured.interference, unmeasured.token_s) == ((), None, None)
        assert (unmeasured.host_tokens, unmeasured.restore_tok_s) == (None, None)

        world.pool.placer.books["a"].rates.learn(LoadSample(Work(500), 0.25, 0.0))
        placement = placement_of("a", 0, 100, (Cost("a"),), "lowest cost")
        for _ in range(3):
            watch.observe(streamed(placement=placement))
        watch.observe(streamed(placement=placement, output_tokens=None))
        (measured,) = watch.engines()
        assert (measured.prefill, measured.samples) == (((500, 0.25),), 1)
        assert measured.interference == 0
        assert measured.token_s == pytest.approx(0.2)
        world.fleet.leave(world.engines["a"])
        assert (watch.engines(), [*watch._token_s]) == ([], ["a"])  # it may come back
        world.fleet.remove(world.engines["a"])
        assert (watch.engines(), [*watch._token_s]) == ([], [])


LONG = "a tide table for every port, " * 40


def blocks(**fields):
    return text_blocks(fields, lambda: blake2b(digest_size=8, key=b"k"))


def user(content, role="user"):
    return {"role": role, "content": content}


def common(one, other):
    return next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def test_an_id_stands_for_all_before_it():
    first, more = blocks(messages=[user(LONG)]), blocks(messages=[user(LONG), user(LONG, "assistant")])
    assert len(first.ids) == len(LONG) // BLOCK_BYTES
    assert more.ids[: len(first.ids)] == first.ids  # a conversation that goes on shares all blocks
    one, other = blocks(messages=[user("a" + LONG)]), blocks(messages=[user("b" + LONG)])
    assert not set(one.ids) & set(other.ids)


def test_marks_for_the_cache_and_the_form_of_a_text_do_not_count():
    marked = [{"type": "text", "text": LONG, "cache_control": {"type": "ephemeral"}}]
    for kind in ("text", "input_text", "output_text"):
        assert blocks(messages=[user([marked[0] | {"type": kind}])]) == blocks(messages=[user(LONG)])
    plain = [{"type": "text", "text": LONG}, {"type": "text", "text": "b"}]
    two = [plain[0] | {"prompt_cache_breakpoint": {}}, plain[1]]
    assert blocks(messages=[user(two)]).ids == blocks(messages=[user(plain)]).ids


def test_the_tools_and_the_system_prompt_end_somewhere():
    found = blocks(tools=[{"name": LONG}], system=LONG, messages=[user(LONG, "system"), user(LONG)])
    each = len(LONG) / BLOCK_BYTES
    assert each < found.tools < found.system < len(found.ids) < 4 * each + 2
    assert found.tools <= each + 2
    assert found.system <= 3 * each + 2


def test_the_order_is_that_of_the_chat_template():
    def of(system, *, is_system_first):
        fields = {"tools": [{"name": LONG}], "messages": [user(system, "system"), user(LONG)]}
        return text_blocks(fields, lambda: blake2b(digest_size=8, key=b"k"), is_system_first=is_system_first)

    for is_system_first in (False, True):
        one, other = (of(system + LONG, is_system_first=is_system_first) for system in "ab")
        shared = common(one.ids, other.ids)
        assert (shared == 0) is is_system_first
        assert (0 < one.system < one.tools) is is_system_first
        assert max(one.system, one.tools) < len(one.ids)
    assert blocks(messages=[user(LONG)]).tools == blocks(messages=[user(LONG)]).system == 0


def test_a_rule_makes_prompts_equal_that_differ_in_what_it_changes():
    one, other = (
        blocks(messages=[user(f"Now 2026-11-25T23:0{minute}:44Z. {LONG}", "system"), user("Hi")])
        for minute in (1, 2)
    )
    assert common(one.ids, other.ids) == 0
    assert one.changed["date_to_day"] == other.changed["date_to_day"]
    assert one.changed.keys() == {"date_to_day", "volatile_last", ALL}
    assert blocks(messages=[user(LONG)]).changed == {}
    assert blocks(messages=["Hi", 7, user(["x"])], tools="none").ids == []
