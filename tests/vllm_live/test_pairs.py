"""Two real vLLMs with a NixlConnector: one computes prompts, the other one pulls their KV and answers.

kvpin runs in this process, so that the engine that answers can be made to look slow: else, with a model this
small, no pair would be worth its transfer.
"""

from __future__ import annotations

import json
import subprocess
from contextlib import ExitStack, asynccontextmanager
from statistics import median

import httpx
import pytest

from engine_adapter import Tier
from proxy.core.audit import Trust
from proxy.core.placement.transfers import TransferResult
from proxy.settings import EngineSettings
from tests.fakes import is_tokenised
from tests.live.fake_world import proxy_over, until
from tests.live.server_world import MODEL, ROOT, free_port
from tests.vllm_live.vllm_world import VllmOptions, running_vllm

pytestmark = pytest.mark.live
REQUESTS = 30
BLOCKS = 200
SIDE_CHANNELS = range(5600, 5700, 2)
CONNECTOR = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
    "kv_load_failure_policy": "recompute",
}


def nixl() -> str:
    """The directory that contains NIXL for the vLLM of scripts/vllm; installs it on first use."""
    command = [ROOT / "scripts" / "vllm", "nixl"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def with_connector() -> VllmOptions:
    return VllmOptions(
        blocks=BLOCKS,
        flags=("--kv-transfer-config", json.dumps(CONNECTOR)),
        environment={
            "PYTHONPATH": nixl(),
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port(SIDE_CHANNELS)),
        },
    )


@asynccontextmanager
async def pair(tmp_path):
    """kvpin over a prefill engine `p` and a decode engine `d`, and their addresses."""
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(running_vllm(tmp_path / f"{name}.log", with_connector()))
            for name in "pd"
        }
        for server in servers.values():
            server.wait()
        roles = {"p": "prefill", "d": "decode"}
        engines = [
            EngineSettings(id=name, kind="vllm", url=server.url, role=roles[name])
            for name, server in servers.items()
        ]
        async with proxy_over(engines, (), interval_s=5.0) as (url, proxy, client):
            await until(lambda: all(e.audit.trust is Trust.PRECISE for e in proxy.fleet.engines.values()))
            await until(lambda: is_tokenised(proxy))
            placer = proxy.fleet.pools[MODEL].placer
            placer.books["d"].rates.pace = 1000.0
            yield proxy, client, url, {name: server.url for name, server in servers.items()}


def asked(number: int) -> tuple[str, dict]:
    """The route and body of a request. The first 20 are completions. The others are chats: their token ids go
    beside the transfer's own parameters."""
    text = " ".join(f"{number}. Entry {at} of log {number}: all was well." for at in range(40))
    body = {"model": MODEL, "max_tokens": 12, "temperature": 0}
    if number < 20:
        return "/v1/completions", body | {"prompt": text}
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    tools = {"tools": [tool], "tool_choice": "none"}
    chat = {"messages": [{"role": "user", "content": text}]}
    return "/v1/chat/completions", body | chat | (tools if number % 2 else {})


def text_of(stream: str) -> str:
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    choices = [event["choices"][0] for event in events if event["choices"]]
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in choices
    )


def whole_text_of(answer: dict) -> str:
    choice = answer["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"] or ""


async def pulled_tokens(client: httpx.AsyncClient, url: str) -> float:
    """Prompt tokens whose KV came from another engine, by the server's own count."""
    lines = (await client.get(f"{url}/metrics")).text.splitlines()
    named = [line for line in lines if line.startswith("vllm:prompt_tokens_by_source_total")]
    return sum(float(line.split()[-1]) for line in named if 'source="external_kv_transfer"' in line)


async def test_the_answers_are_those_of_a_single_engine(tmp_path, tell):
    async with pair(tmp_path) as (proxy, client, url, servers):
        legs, transfers, pool, moved = list[float](), list[float](), proxy.fleet.pools[MODEL], 0
        for number in range(REQUESTS):
            path, body = asked(number)
            answer = await client.post(f"{url}{path}", json=body | {"stream": True}, timeout=120)
            assert answer.status_code == 200, answer.text
            await until(lambda: not any(engine.leases for engine in pool.engines.values()))
            record = list(proxy.flow.requests)[-1]
            moved += record.transfer is TransferResult.MOVED
            if record.transfer is TransferResult.MOVED:
                legs.append(record.first_leg_s)
                transfers.append(record.transfer_s)
            alone = await client.post(f"{servers['p']}{path}", json=body, timeout=120)
            assert text_of(answer.text) == whole_text_of(alone.json())
        pulled = await pulled_tokens(client, servers["d"])
        prompts = sum(record.n_tokens for record in proxy.flow.requests)
        assert moved > 0.8 * REQUESTS, "on a machine this busy, an engine may miss a health check"
        assert pulled > 0.9 * prompts * moved / REQUESTS, (pulled, prompts)
        audit = proxy.fleet.engines["p"].audit.view()
        assert audit.exact == audit.checked >= moved
        # In blocks of 16. What it pulled first was evicted, and it said so.
        await until(lambda: pool.index.held("d", Tier.GPU) <= 2 * BLOCKS)
        path, again = asked(REQUESTS - 1)
        pool.placer.books["d"].rates.pace = 1.0
        await client.post(f"{url}{path}", json=again | {"stream": True}, timeout=120)
        record = list(proxy.flow.requests)[-1]
        assert (record.engine, record.prefilled_by) == ("d", None), "it holds what it pulled"
        assert record.reported_tokens == record.predicted_tokens > 0
        tell(
            f"{REQUESTS} requests, texts equal; {moved} pulled, {pulled:.0f} of {prompts} tokens",
            f"first legs: median {median(legs):.3f} s, longest {max(legs):.3f} s",
            f"transfers: first {transfers[0]:.3f} s, median {median(transfers):.3f} s, "
            f"longest {max(transfers):.3f} s",
        )
