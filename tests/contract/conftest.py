"""Every kind of adapter, each in front of an engine on real sockets."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from engine_adapter import ENGINE_KINDS, EngineAdapter, make_adapter
from tests.engine_adapter.conftest import make as adapter_of  # noqa: F401 - a fixture
from tests.engine_adapter.conftest import transport  # noqa: F401 - and another
from tests.engines import engine_spec
from tests.fake_engines.core import EngineCore
from tests.fake_engines.lmdeploy import running_lmdeploy
from tests.fake_engines.nim import FakeNim, running_nim
from tests.fake_engines.sglang import running_sglang
from tests.fake_engines.tensorrt_llm import RunningTrtllm, running_trtllm
from tests.fake_engines.vllm import running_vllm


@dataclass(frozen=True, slots=True)
class Server:
    """The server for the tests of an adapter.

    Attributes:
        cores: of a fake one.
    """

    url: str
    cores: Sequence[EngineCore] = ()

    @contextmanager
    def decoding_for_long(self) -> Iterator[None]:
        """Requests for many tokens run until `go_on`, or the block ends; a real server takes its own time."""
        for core in self.cores:
            core.hold(after=1)
        try:
            yield
        finally:
            self.go_on()

    def go_on(self) -> None:
        for core in self.cores:
            core.release()


@pytest.fixture(scope="session")
def vllm_server() -> Iterator[Server]:
    """A fake one, or a real one at KVPIN_TEST_VLLM: idle, with 100 blocks of 32 tokens."""
    if address := os.environ.get("KVPIN_TEST_VLLM"):
        yield Server(address)
        return
    with running_vllm(block_size=32, num_gpu_blocks=100) as vllm:
        yield Server(vllm.url, vllm.fake.cores)


@pytest.fixture(scope="session")
def vllm_pair() -> Iterator[tuple[str, str]]:
    """The addresses of two with a NixlConnector: fakes, or real ones at KVPIN_TEST_PAIR, with a blank
    between; blocks of 32 tokens."""
    if addresses := os.environ.get("KVPIN_TEST_PAIR"):
        prefill, decode = addresses.split()
        yield prefill, decode
        return
    with (
        running_vllm(block_size=32, num_gpu_blocks=200, nixl=True) as prefill,
        running_vllm(block_size=32, num_gpu_blocks=200, nixl=True) as decode,
    ):
        yield prefill.url, decode.url


@pytest.fixture(scope="session")
def sglang_server() -> Iterator[Server]:
    """A fake one, or a real one at KVPIN_TEST_SGLANG: idle, with 128 pages of 16 tokens."""
    if address := os.environ.get("KVPIN_TEST_SGLANG"):
        yield Server(address)
        return
    with running_sglang(page_size=16, capacity=128) as running:
        yield Server(running.url, running.fake.cores)


@pytest.fixture(scope="session")
def sglang_ranks() -> Iterator[str]:
    """The address of one with two ranks, a fake one or a real one at KVPIN_TEST_SGLANG_RANKS."""
    if address := os.environ.get("KVPIN_TEST_SGLANG_RANKS"):
        yield address
        return
    with running_sglang(page_size=16, capacity=128, ranks=2) as running:
        yield running.url


@pytest.fixture(scope="session")
def trtllm_server() -> Iterator[RunningTrtllm]:
    with running_trtllm() as running:
        yield running


@pytest.fixture(scope="session")
def lmdeploy() -> Iterator[str]:
    """The address of a fake one, or of a real one at KVPIN_TEST_LMDEPLOY: idle, with prefix caching."""
    if address := os.environ.get("KVPIN_TEST_LMDEPLOY"):
        yield address
        return
    with running_lmdeploy() as running:
        yield running.url


@pytest.fixture(scope="session")
def nim() -> Iterator[str]:
    """The address of a fake one, with a fake TensorRT-LLM inside."""
    with running_trtllm() as inside, running_nim(FakeNim(tuple(inside.fake.app.routes))) as url:
        yield url


@pytest.fixture(params=ENGINE_KINDS)
async def adapter(
    request, embedded_engine, llama, vllm_server, sglang_server, trtllm_server, lmdeploy, nim
) -> AsyncIterator[EngineAdapter]:
    is_llama = request.param == "llama_server"
    urls = {
        "llama_server": llama.url,
        "vllm": vllm_server.url,
        "sglang": sglang_server.url,
        "tensorrt_llm": trtllm_server.url,
        "lmdeploy": lmdeploy,
        "nim": nim,
    }
    spec = engine_spec(
        request.param,
        urls.get(request.param, embedded_engine.url),
        "under-test",
        **({"host_cache_dir": str(llama.save_dir)} if is_llama else {}),
    )
    adapter = make_adapter(spec)
    yield adapter
    await adapter.aclose()
