import os
import pty
import signal
import subprocess
import sys
import time

import httpx
import pytest

from tests.proxy.cli.test_client import admin

KEY = ("--admin-key", "secret")


@pytest.mark.live
def test_without_a_terminal_it_prints_once(kvpin, live_proxy):
    result = kvpin("top", "--url", live_proxy, *KEY)
    assert result.exit_code == 0, result.output
    assert "1 of 1 engines ready" in result.stdout
    assert "e0" in result.stdout


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
