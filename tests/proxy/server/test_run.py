"""The port, the warnings at start, and what each signal does to a running kvpin."""

import asyncio
import contextlib
import json
import os
import signal
import socket
from types import SimpleNamespace

import httpx
import pytest
import uvloop
from structlog.testing import capture_logs

from engine_adapter import HttpTransport
from proxy.core.books import IssuedKey
from proxy.fleet.state_files import KeyBookFile
from proxy.http.listeners import listen
from proxy.server import run
from proxy.settings import EngineSettings, Settings, SettingsError
from tests.fakes import CHAT, STREAM, FakeEngine, answer, event
from tests.kv_world import until
from tests.live.conftest import running_kvpin

ELSEWHERE = EngineSettings(kind="vllm", url="http://127.0.0.1:1", id="v")


@pytest.mark.parametrize(
    ("host", "keys", "warns"),
    [
        ("0.0.0.0", (), True),
        ("0.0.0.0", ({"key": "k"},), False),
        ("127.0.0.1", (), False),
        ("127.0.0.1,0.0.0.0", (), True),
        ("127.0.0.1,127.0.0.2", (), False),
    ],
)
def test_engines_that_anyone_can_use_are_warned_of(host, keys, warns):
    settings = Settings(host=host, port=0, api_keys=keys, reuse=True)
    with contextlib.ExitStack() as stack, capture_logs() as entries:
        run._warn(settings, [stack.enter_context(listen(each, 0)) for each in settings.hosts])
    assert [entry["host"] for entry in entries] == [host] * warns


def test_issued_keys_close_it_and_those_that_have_ended_are_warned_of(tmp_path):
    issued = IssuedKey("key-1", "t", b"d", "last", 0.0, expires=1.0)
    KeyBookFile(tmp_path).add([issued])
    settings = Settings(host="0.0.0.0", port=0, state_dir=tmp_path)
    with listen("0.0.0.0", 0) as listener, capture_logs() as entries:
        run._warn(settings, [listener])
    assert [each["event"] for each in entries] == [
        "the issued key key-1 has expired: kvpin keys remove key-1"
    ]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_short_key_is_refused_where_a_socket_of_systemd_lets_other_machines_in(monkeypatch, workers):
    given, loads = ["k" * 16], []
    monkeypatch.setattr(run, "configure_logs", lambda _logs: None)
    monkeypatch.setattr(
        run, "Workers", lambda _settings, load, *_, **__: SimpleNamespace(run=lambda: loads.append(load))
    )
    monkeypatch.setattr(run, "_run", lambda _settings, _listeners, load, **_: loads.append(load))
    monkeypatch.setattr(run, "_until_done", lambda _: 0)

    def load():
        return Settings(
            engines=(ELSEWHERE,), workers=workers, metrics_key=given[-1], api_keys=({"key": "k"},)
        )

    said = r"metrics_key needs at least 16 characters where other machines reach kvpin \(0\.0\.0\.0\)"
    with listen("0.0.0.0", 0) as listener:
        monkeypatch.setattr(run, "inherited", lambda: [listener])
        assert run.serve(load) == 0
        (again,) = loads
        assert again() == load()
        given.append("short")
        with pytest.raises(SettingsError, match=said):
            again()
        with pytest.raises(SettingsError, match=said):
            run.serve(load)


async def endless(exchange):
    if exchange.target != CHAT:
        await answer(exchange)
        return
    await exchange.start()
    while not exchange.left.is_set():
        await exchange.chunk(event({"choices": [{"delta": {"content": "x"}}]}))
        await asyncio.sleep(0.05)


async def test_a_second_interrupt_cuts_answers_short_without_a_traceback(tmp_path):
    log, got = tmp_path / "log", []
    async with FakeEngine("a", endless) as engine, contextlib.AsyncExitStack() as stack:
        named = f"--engine=openai-compatible={engine.url},id=a"
        process = running_kvpin(log, "--log-format", "json", named, tokenised=False)
        kvpin = await asyncio.to_thread(process.__enter__)
        stack.push_async_exit(lambda *error: asyncio.to_thread(process.__exit__, *error))
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=60, trust_env=False))
        async with client.stream("POST", f"{kvpin.url}{CHAT}", json=STREAM) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            kvpin.process.send_signal(signal.SIGINT)
            await until(lambda: "waiting for running answers" in log.read_text(), 30)
            await anext(lines)
            kvpin.process.send_signal(signal.SIGINT)
            with contextlib.suppress(httpx.TransportError):
                async for line in lines:
                    got.append(line)  # noqa: PERF401 - kept although the stream breaks
            await until(lambda: kvpin.process.poll() == 0, 20)  # the grace is 30 s
    error = json.loads([line for line in got if line][-1].removeprefix("data: "))["error"]
    assert (error["code"], error["message"]) == ("no_engine", "kvpin is stopping; try again shortly")
    said = log.read_text()
    assert "told to stop again: running answers are cut short" in said
    assert "Traceback" not in said
    assert '"exception"' not in said


async def test_a_signal_during_the_start_is_not_lost(monkeypatch):
    start = run.Proxy.start

    def start_and_be_told_to_stop(proxy):
        start(proxy)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(run.Proxy, "start", start_and_be_told_to_stop)
    with listen("127.0.0.1", 0) as listener:
        async with asyncio.timeout(60):
            assert await run._run(Settings(engines=(ELSEWHERE,)), [listener], None) == 0


async def test_a_third_interrupt_ends_it_at_once(monkeypatch):
    ended = []
    monkeypatch.setattr(run.os, "_exit", ended.append)
    proxy = run.Proxy(Settings(engines=(ELSEWHERE,)), HttpTransport())
    running = run._Server(proxy, None, [])
    for _ in range(2):
        running.on_signal(signal.SIGINT)
    assert (proxy.draining.is_set(), running._is_cut, ended) == (True, True, [])
    running.on_signal(signal.SIGINT)
    assert ended == [130]
    await proxy.stop()


async def test_a_new_drain_s_counts_without_a_restart():
    before, now = (Settings(engines=(ELSEWHERE,), drain_s=drain_s) for drain_s in (3600, 0.01))
    proxy = run.Proxy(before, HttpTransport())
    with listen("127.0.0.1", 0) as listener, capture_logs() as entries:
        running = run._Server(proxy, lambda: now, [listener])
        running.on_signal(signal.SIGHUP)
        running.on_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            await running.serve()
    assert [entry["drain_s"] for entry in entries if "drain_s" in entry] == [0.01]
    assert not [entry for entry in entries if "settings" in entry]  # none needs a restart
    await proxy.stop()


def test_connections_that_wait_are_accepted_in_one_round_of_the_loop(monkeypatch):
    """Else each waits until all that are open have had their turn, as many times as there are before it."""
    rounds, accepted = 0, []  # `accepted`: the round of each
    begin = run.Http1Protocol.connection_made

    def begin_noted(self, transport):
        begin(self, transport)
        accepted.append(rounds)

    async def serve_some(n):
        proxy = run.Proxy(Settings(engines=(ELSEWHERE,)), HttpTransport())

        def count():
            nonlocal rounds
            rounds += 1
            if len(accepted) < n:
                asyncio.get_running_loop().call_soon(count)
            else:
                running.on_signal(signal.SIGINT)

        with listen("127.0.0.1", 0) as listener, contextlib.ExitStack() as stack:
            for _ in range(n):
                stack.enter_context(socket.create_connection(listener.getsockname()))
            running = run._Server(proxy, None, [listener])
            count()
            async with asyncio.timeout(60):
                await running.serve()
        await proxy.stop()

    monkeypatch.setattr(run.Http1Protocol, "connection_made", begin_noted)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_some(32))
    assert accepted == [accepted[0]] * 32
