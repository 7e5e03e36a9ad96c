"""A real kvpin with tracing on, a scripted engine behind it, and a collector."""

from contextlib import asynccontextmanager

import pytest

from engine_adapter import HttpTransport
from proxy.server.app import Proxy, build_app
from proxy.settings import EngineSettings, Settings
from tests.collector import collecting
from tests.fakes import FakeEngine, client_of, is_tokenised, serving
from tests.kv_world import until


@pytest.fixture
def collector(monkeypatch):
    for name in ("OTEL_TRACES_SAMPLER", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_SERVICE_NAME", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        yield collector


@pytest.fixture
async def engine():
    async with FakeEngine("a") as engine:
        yield engine


@pytest.fixture
def traced(engine, tokenizer_dir):
    """A kvpin as a context; when it is left, the collector has everything."""

    @asynccontextmanager
    async def run(*others, **settings):
        tokenizer = str(tokenizer_dir) if settings.get("reuse") else None  # to load it takes seconds
        engines = [
            EngineSettings(kind="openai_compatible", url=each.url, id=each.id, tokenizer=tokenizer)
            for each in (engine, *others)
        ]
        proxy = Proxy(Settings(otel=True, engines=engines, **settings), HttpTransport())
        proxy.start()
        try:
            async with serving(build_app(proxy)) as proxy.url, client_of(proxy) as client:
                await until(lambda: proxy.fleet.is_ready() and is_tokenised(proxy), 60)
                yield proxy, client
        finally:
            await proxy.stop()

    return run
