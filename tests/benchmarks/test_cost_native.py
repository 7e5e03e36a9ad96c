"""The C mock engine and load generator: one speaks as a vLLM does, the other counts what it gets."""

import os
import shutil
import subprocess

import msgspec
import pytest

from engine_adapter import Capability, EngineSpec, JsonBody, make_adapter

pytestmark = [
    pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc"),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core"),
]
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}


@pytest.fixture
def engine(script):
    with script.mock_engine() as engine:
        yield engine


@pytest.fixture
def bodies(script, tmp_path):
    def write(*bodies):
        path = tmp_path / "bodies"
        script.write_bodies(path, [msgspec.json.encode(CHAT | body) for body in bodies])
        return path

    return write


def port_of(engine):
    return int(engine.url.rpartition(":")[2])


async def test_kvpin_takes_the_mock_engine_for_a_vllm(script):
    with script.mock_engine(tokenizes=True) as engine:
        adapter = make_adapter(EngineSpec("vllm", engine.url, "engine-0"))
        try:
            info = await adapter.connect()
            ids = await adapter.tokenize("/v1/chat/completions", JsonBody(msgspec.json.encode(CHAT)))
            load = await adapter.load()
        finally:
            await adapter.aclose()
    assert (info.model, info.tokens_per_block, info.gpu_blocks) == ("m", 16, 60_000)
    wanted = {Capability.TOKENIZE, Capability.CACHED_TOKENS, Capability.CACHE_SALT}
    assert info.capabilities == wanted
    assert len(ids) > 5
    assert (load.running, load.waiting) == (0, 0)


def test_every_request_is_answered_and_timed(script, engine, bodies):
    played = script.play(port_of(engine), 16, 200, bodies({}, {"messages": [CHAT["messages"][0]] * 2000}))
    assert (len(played.took_us), played.failed, played.errors) == (200, 0, [])
    assert 0 < sum(played.took_us) <= 16 * played.wall_s * 1e6


def test_refused_requests_are_counted_and_the_first_is_shown(script, engine, bodies):
    played = script.play(port_of(engine), 2, 10, bodies({}, {"cache_salt": ""}))
    assert (len(played.took_us), played.failed) == (5, 5)
    assert "HTTP/1.1 400 Bad Request" in played.errors[0]


@pytest.mark.parametrize(("interval_us", "least_us"), [(0, 0), (3000, 7 * 3000 - 1000)])
def test_streams_keep_their_pace_and_no_chunk_is_missed(script, engine, bodies, interval_us, least_us):
    engine.pace(interval_us)
    played = script.play(port_of(engine), 4, 12, bodies({"stream": True, "max_tokens": 8}))
    assert (played.failed, played.chunks, sum(count for _, count in played.delays_us)) == (0, 96, 96)
    assert min(played.took_us) >= least_us
    assert max(delay for delay, _ in played.delays_us) <= played.worst_delay_us


def test_a_stream_that_ends_early_is_a_dropped_one(script, bodies):
    path = bodies({"stream": True, "max_tokens": 400})
    with script.mock_engine() as engine:
        engine.pace(10_000)
        command = script.client_command(port_of(engine), 5, 5, path, open_per_s=100)
        with subprocess.Popen(command, stdout=subprocess.PIPE) as client:
            assert client.stdout.readline() == b"open\n"
            engine.process.kill()
            played = msgspec.json.decode(client.stdout.readline(), type=script.Played)
    assert (len(played.took_us), played.failed) == (0, 5)
