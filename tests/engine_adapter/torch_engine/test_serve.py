"""The engine as a process: start, signals, failures, a parent that ends, bad options."""

from __future__ import annotations

import json
import re
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from typer.main import get_command
from typer.testing import CliRunner

from engine_adapter import EngineUnavailable
from engine_adapter.errors import EngineSpecError
from engine_adapter.torch_engine import server
from engine_adapter.torch_engine.engine import MAX_FAILED_STEPS
from engine_adapter.torch_engine.serve import DEFAULT_KV_BLOCKS, MEMORY_SHARE, EmbeddedOptions, app
from engine_adapter.torch_engine.server import serve_engine
from proxy.fleet.managed_engine import ManagedEngine
from tests.engine_adapter.torch_engine import failing_engine as failing
from tests.engines import running_engine

STOP_S = 30


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return tmp_path_factory.mktemp("serve") / "log"


def test_a_signal_ends_it_after_its_requests(log):
    flags = ("--kv-blocks", "64", "--tokens-per-block", "8", "--served-model-name", "tiny", "--seed", "1")
    with running_engine(log, *flags) as engine, httpx.Client(base_url=engine.url, trust_env=False) as client:
        info = client.get("/kv/info").json()
        assert (info["gpu_blocks"], info["tokens_per_block"], info["model"]) == (64, 8, "tiny")
        assert "random weights" in log.read_text()
        steps = ("importing torch", "loading the model", "checking that tiny answers", "KV cache: 64 blocks")
        assert re.search(".*".join(steps), log.read_text(), re.DOTALL)
        body = {"prompt": [5] * 9, "max_tokens": 60, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            engine.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert engine.process.wait(STOP_S) == 0


def test_it_ends_when_its_parent_does(log):
    with running_engine(log, "--kv-blocks", "64") as engine:
        engine.process.stdin.close()
        assert engine.process.wait(STOP_S) == 0


def failing_engine(log, blocks=64):
    return running_engine(log, "--kv-blocks", str(blocks), program=[str(Path(failing.__file__))])


def test_what_a_signals_grace_does_not_suffice_for_is_another_engines_to_answer(log):
    with (
        failing_engine(log, blocks=600) as engine,
        httpx.Client(base_url=engine.url, trust_env=False, timeout=STOP_S) as client,
        ThreadPoolExecutor() as pool,
    ):
        whole = pool.submit(complete, client, 5, max_tokens=8000)
        body = {"prompt": [7, 8, 9], "max_tokens": 8000, "ignore_eos": True, "stream": True}
        read: list[str] = []
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            read.append(next(lines))
            engine.process.send_signal(signal.SIGTERM)
            with pytest.raises(httpx.RemoteProtocolError):
                read.extend(line for line in lines if line)
        error = whole.result()
        assert (error.status_code, error.json()["error"]["code"]) == (503, "engine_unavailable")
        assert json.loads(read[-1].removeprefix("data: "))["error"]["code"] == "engine_unavailable"
        assert engine.process.wait(STOP_S) == 0
        assert "Traceback" not in log.read_text()


def test_kvpin_kills_no_engine_that_still_tells_its_clients_that_it_ends():
    assert ManagedEngine.grace_s > server._GRACE_S + server._TO_TELL_S


@pytest.fixture(scope="module")
def survivor(log):
    """An engine that fails some requests and goes on."""
    with failing_engine(log.with_name("survivor")) as engine:
        yield engine


def complete(client, first, **fields):
    body = {"prompt": [first, *range(20)], "max_tokens": 40, "temperature": 0, "ignore_eos": True} | fields
    return client.post("/v1/completions", json=body)


def test_a_request_that_fails_is_a_500_not_to_be_retried_and_the_others_go_on(survivor):
    with httpx.Client(base_url=survivor.url, trust_env=False, timeout=STOP_S) as client:
        alone = complete(client, 5).json()["choices"]
        with ThreadPoolExecutor() as pool:
            good = pool.submit(complete, client, 5, cache_salt="beside")
            failed = pool.submit(complete, client, failing.FAILS)
            streamed = pool.submit(complete, client, failing.FAILS, stream=True)
        for response in (failed.result(), streamed.result()):
            assert response.status_code == 500
            assert response.headers["x-should-retry"] == "false"
            error = response.json()["error"]
            assert (error["type"], error["code"]) == ("server_error", "request_failed")
            assert "index out of range" in error["message"]
        assert good.result().json()["choices"] == alone
        assert client.get("/health").status_code == 200


def test_a_stream_that_fails_in_the_middle_ends_with_an_error_event(survivor):
    with httpx.Client(base_url=survivor.url, trust_env=False, timeout=STOP_S) as client:
        response = complete(client, failing.FAILS_LATER, stream=True)
    assert response.status_code == 200
    *chunks, error, end = [line.removeprefix("data: ") for line in response.text.split("\n") if line]
    assert "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks)
    assert json.loads(error)["error"]["code"] == "request_failed"
    assert end == "[DONE]"


def test_a_broken_device_ends_the_process_so_that_it_is_started_again(log):
    with failing_engine(log) as engine, httpx.Client(base_url=engine.url, trust_env=False) as client:
        response = complete(client, failing.BREAKS_THE_DEVICE)
        assert response.status_code == 500
        assert response.headers["x-should-retry"] == "false"
        assert engine.process.wait(STOP_S) == 1
        assert "the engine died and must be started again: AcceleratorError: CUDA error" in log.read_text()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--pin-share", "2"], "pin_share is 2"),
        (["--model", "/nowhere"], "kvpin engine: cannot load model '/nowhere'"),
    ],
)
def test_what_cannot_be_ends_it_with_one_line(flags, said):
    before = signal.getsignal(signal.SIGTERM)
    result = CliRunner().invoke(app, ["--port", "0", *flags])
    assert result.exit_code == 2
    assert said in result.output
    assert signal.getsignal(signal.SIGTERM) is before


def test_every_flag_and_every_failure_is_documented():
    page = (Path(__file__).parents[3] / "docs" / "engines" / "embedded.md").read_text(encoding="utf-8")
    for parameter in get_command(app).params:
        assert parameter.opts[0] in page
    assert f"{MAX_FAILED_STEPS} steps in a row" in page
    assert f"{EmbeddedOptions().pin_share:.0%} by" in page
    for code in ("request_failed", "engine_unavailable", "pin_limit_reached", "context_length_exceeded"):
        assert f"`{code}`" in page


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"tokens_per_block": 12}, "tokens_per_block is 12; a power of two"),
        ({"kv_blocks": 1, "kv_bytes": 1}, "kv_blocks and kv_bytes"),
        ({"kv_blocks": 0}, "kv_blocks is 0"),
        ({"kv_bytes": -1}, "kv_bytes is -1"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"prefill_chunk": 0}, "prefill_chunk is 0"),
        ({"pin_share": 1.1}, "pin_share is 1.1"),
        ({"host_cache_bytes": -5}, "host_cache_bytes is -5"),
    ],
)
def test_bad_values_are_named(values, named):
    with pytest.raises(EngineSpecError, match=named):
        EmbeddedOptions(**values)


def blocks(available=None, context=1000, **values):
    return EmbeddedOptions(**values).gpu_blocks(100, context=context, available=available)


def test_without_a_size_the_cache_holds_what_requests_need_in_a_part_of_the_memory():
    assert blocks(available=10**9) == 32 * 63
    assert blocks(available=10**9, max_num_seqs=2, tokens_per_block=8) == 2 * 125
    assert blocks(available=int(100 * 100 / MEMORY_SHARE)) == 100
    assert (blocks(), blocks(kv_bytes=1050)) == (DEFAULT_KV_BLOCKS, 10)
    with pytest.raises(EngineSpecError, match="25% of the free memory is 97, less than one block"):
        blocks(available=388)


def test_a_port_in_use_is_named_and_may_be_free_later():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EngineUnavailable, match=str(port)):
            serve_engine(EmbeddedOptions(port=port))
