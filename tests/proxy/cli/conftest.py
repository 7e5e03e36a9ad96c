import re
import subprocess
import sys
import threading
import time

import httpx
import pytest
from typer.testing import CliRunner

from proxy.cli.main import app


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    """What the developer's shell exports must not reach the commands under test."""
    for name in ("KVPIN_URL", "KVPIN_ADMIN_KEY", "KVPIN_API_KEYS", "KVPIN_CONFIG", "ENABLE_KV_CACHE_REUSE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def kvpin():
    """Runs a command in this process: `kvpin("stats", "--json")`."""
    runner = CliRunner()
    return lambda *words, **options: runner.invoke(app, list(words), **options)


@pytest.fixture(scope="session")
def live_proxy(embedded_engine):
    """The address of `kvpin serve` in front of the shared engine."""
    command = [sys.executable, "-m", "proxy.cli", "serve", "--port", "0", "--reuse", "--admin-key", "secret"]
    process = subprocess.Popen(
        [*command, "--engine", f"embedded={embedded_engine.url},id=e0", "--log-level", "warning"],
        stdout=subprocess.PIPE,
        text=True,
    )
    lines, found = [], threading.Event()

    def read():
        for line in process.stdout:
            lines.append(line)
            if line.startswith("ready:"):
                found.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        if not found.wait(60):
            pytest.fail(f"kvpin did not start:\n{''.join(lines)}")
        url = re.search(r"base_url\s+(http://\S+)/v1", "".join(lines))[1]
        _until_precise(url)
        yield url
    finally:
        process.terminate()
        process.wait(30)
        reader.join(5)
        process.stdout.close()


def _until_precise(url):
    deadline = time.monotonic() + 30
    headers = {"authorization": "Bearer secret"}
    while True:
        answer = httpx.get(f"{url}/admin/v1/engines", headers=headers, trust_env=False).json()
        if answer["engines"][0]["trust"] == "precise":
            return
        assert time.monotonic() < deadline, answer
        time.sleep(0.05)
