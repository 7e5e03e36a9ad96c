import os
import pty
import signal
import subprocess
import sys
import time

import httpx
import pytest
from rich.console import Console

from proxy.cli.decisions import TopView
from tests.proxy.cli.test_client import admin

KEY = ("--admin-key", "secret")


@pytest.mark.live
def test_without_a_terminal_it_prints_once(kvpin, live_proxy):
    result = kvpin("top", "--url", live_proxy, *KEY)
    assert result.exit_code == 0, result.output
    assert "1 of 1 engines ready" in result.stdout
    assert "e0" in result.stdout


def test_bad_input_is_one_sentence(kvpin):
    result = kvpin("top", "--url", "http://127.0.0.1:9")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("kvpin: nothing answers at http://127.0.0.1:9")
    assert result.stderr.count("\n") == 1


@pytest.mark.live
def test_the_key_is_asked_for(kvpin, live_proxy):
    result = kvpin("top", "--url", live_proxy)
    assert (result.exit_code, "the admin key is missing or wrong" in result.stderr) == (1, True)


def test_something_else_is_no_kvpin(kvpin):
    with admin(lambda *_: (200, b"<html>")) as (url, _):
        result = kvpin("top", "--url", url)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"kvpin: {url} sends no events: it is no kvpin, or is about to stop\n"


@pytest.mark.live
def test_a_request_appears_on_the_terminal(live_proxy):
    screen, terminal = pty.openpty()
    command = [sys.executable, "-m", "proxy.cli", "top", "--url", live_proxy, *KEY]
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "200", "LINES": "40"}
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=env)
    os.close(terminal)
    try:
        shown = _read_until(screen, b"", b"1 of 1 engines ready")
        body = {"model": "kvpin-tiny", "messages": [{"role": "user", "content": "Hi!"}], "max_tokens": 1}
        httpx.post(f"{live_proxy}/v1/chat/completions", json=body, timeout=60, trust_env=False)
        _read_until(screen, shown, b"first byte")
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait(30)
        os.close(screen)


def _read_until(screen, shown, wanted):
    deadline = time.monotonic() + 60
    while wanted not in shown:
        assert time.monotonic() < deadline, shown
        shown += os.read(screen, 65536)
    return shown


COUNTS = ("prompt_tokens", "available_tokens", "selected_tokens", "delivered_tokens", "saved_s")
REUSE = dict.fromkeys(COUNTS, 0)


def engine(name, **fields):
    return {
        "id": name, "model": "m", "state": "ready", "trust": "precise", "queue_s": 0.25, "in_flight": 3,
        "held_tokens": {"gpu": 800, "host": 16}, "capacity_tokens": {"gpu": 1600}, "reuse": REUSE,
        "last_error": None, **fields,
    }  # fmt: skip


def snapshot(at, requests, engines, **reuse):
    return {
        "at": at, "reuse_on": True, "requests": requests, "waiting": {"m": 2},
        "reuse": {**REUSE, **reuse}, "engines": engines,
    }  # fmt: skip


def request(name, **fields):
    return {
        "request_id": name, "started": 0.0, "engine": "e0", "status": None, "n_tokens": 50,
        "available_tokens": 48, "predicted_tokens": 32, "is_firm": True, "reported_tokens": None,
        "first_byte_s": None,
        "why": "the only one", **fields,
    }  # fmt: skip


def drawn(view, width=160, height=None):
    console = Console(width=width, height=height or 40, file=None, record=True, highlight=False)
    with console.capture() as capture:
        console.print(view, height=height)
    return capture.get()


def test_rates_are_those_of_the_last_seconds():
    view = TopView("http://k")
    for at in range(21):
        reuse = {"prompt_tokens": 100 * at, "available_tokens": 80 * at, "delivered_tokens": 60 * at}
        view.take("snapshot", snapshot(at, 5 * at, [engine("e0"), engine("e1", state="down")], **reuse))
    text = drawn(view)
    assert "\ne0 " in text
    assert "\ne1 " in text
    assert "1 of 2 engines ready · 5.0 requests/s · 2 waiting" in text
    assert "of prompt tokens 80% available, 60% reused" in text
    assert "800 50%" in text
    view.take("snapshot", snapshot(22, 0, []))  # kvpin was restarted
    assert "0 of 0 engines ready · 2 waiting" in drawn(view)


def test_a_request_keeps_its_reason_and_its_place():
    view = TopView("http://k")
    view.take("snapshot", snapshot(0, 0, [engine("e0")]))
    view.take("placed", request("a"))
    view.take("placed", request("b", why="another"))
    view.take("finished", request("a", status=200, reported_tokens=32, first_byte_s=0.012, why=None))
    lines = drawn(view).splitlines()
    assert " ".join(lines[-2].split()[1:]) == "e0 200 50 48 32 32 12 ms the only one"
    view.take("finished", request("a", status=200, is_firm=False))
    assert " ~32 " in drawn(view)
    assert "another" in lines[-1]
    assert " … " in lines[-1]


def test_it_fits_a_small_terminal_and_many_engines():
    view = TopView("http://k")
    view.take("snapshot", snapshot(0, 0, [engine(f"engine-{n}") for n in range(256)]))
    for n in range(500):
        view.take("placed", request(str(n)))
    lines = drawn(view, width=60, height=24).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 60
    assert any("more engines" in line for line in lines)
