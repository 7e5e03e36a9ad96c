import time

import httpx
import pytest
from typer.testing import CliRunner

from proxy.cli.main import app
from tests.live.conftest import running_kvpin


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
def live_proxy(embedded_engine, tmp_path_factory):
    """The address of `kvpin serve` in front of the shared engine."""
    engine = f"embedded={embedded_engine.url},id=e0"
    log = tmp_path_factory.mktemp("kvpin") / "log"
    with running_kvpin(log, "--admin-key", "secret", "--engine", engine, "--log-level", "warning") as proxy:
        _until_precise(proxy.url)
        yield proxy.url


def _until_precise(url):
    deadline = time.monotonic() + 30
    headers = {"authorization": "Bearer secret"}
    while True:
        answer = httpx.get(f"{url}/admin/v1/engines", headers=headers, trust_env=False).json()
        if answer["engines"][0]["trust"] == "precise":
            return
        assert time.monotonic() < deadline, answer
        time.sleep(0.05)
