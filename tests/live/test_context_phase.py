"""One TensorRT-LLM computes prompts, another one reads their KV and answers. Both are fakes that follow its
sources; the adapter, the events and the whole of kvpin are real."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from time import monotonic

import pytest

from engine_adapter import Role
from engine_adapter.tensorrt_llm.requests import ContextPhase
from proxy.core.placement.pairs import TransferResult
from proxy.request.records import RequestRecord
from proxy.settings import EngineSettings
from tests.fake_engines.tensorrt_llm import FakeTrtllm, RunningTrtllm, running_trtllm
from tests.fake_engines.text import MODEL_DIR
from tests.live.answers import texts_of
from tests.live.fake_world import KEYS, FakeWorld, proxy_over, until
from tests.live.test_pairs import TEXT

pytestmark = pytest.mark.usefixtures("nothing_lingers")

ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "e": Role.DECODE}
COMPLETIONS, CHAT = "completions", "chat/completions"


def completion(**fields) -> dict:
    return {"model": "tiny", "prompt": TEXT, "max_tokens": 6, **fields}


def chat(**fields) -> dict:
    return {"model": "tiny", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 6, **fields}


KINDS = {
    "stream": (COMPLETIONS, completion(stream=True)),
    "stream without model": (COMPLETIONS, completion(stream=True, model=None)),
    "chat stream": (CHAT, chat(stream=True)),
    "completion": (COMPLETIONS, completion()),
    "chat": (CHAT, chat()),
    "one token": (COMPLETIONS, completion(stream=True, max_tokens=1)),
    "logprobs": (COMPLETIONS, completion(stream=True, logprobs=1)),
}
STREAM = KINDS["stream"]


@dataclass(frozen=True)
class PhasesWorld(FakeWorld):
    """kvpin, and the fakes behind it by their names: `p` computes prompts, `d` and `e` answer."""

    fakes: dict[str, RunningTrtllm]

    def is_read(self, name: str) -> bool:
        reader, fake = self.engine(name).adapter._poller.reader, self.fakes[name].fake
        return reader._last == fake.events._next - 1

    async def ask(self, path: str, body: dict, tenant: str | None = None) -> tuple[list[str], RequestRecord]:
        """The texts of an answer, and kvpin's record of it, once all events are read."""
        headers = {"authorization": f"Bearer {KEYS[tenant]}"} if tenant else {}
        body = {name: value for name, value in body.items() if value is not None}
        answer = await self.client.post(f"{self.url}/v1/{path}", json=body, headers=headers)
        await until(self.is_idle)
        await self.settle()
        return texts_of(answer), self.last

    async def alone(self, path: str, body: dict) -> list[str]:
        """The texts of a single server's answer."""
        with running_trtllm() as single:
            body = body | {"model": "tiny"}
            return texts_of(await self.client.post(f"{single.url}/v1/{path}", json=body))

    def sent(self, name: str) -> list[dict]:
        """What a server was sent through kvpin."""
        return [body for _, body in self.fakes[name].fake.seen if body.get("max_tokens")]


@asynccontextmanager
async def world_of(
    names: str = "pd", *, tenants: tuple[str, ...] = (), **options
) -> AsyncIterator[PhasesWorld]:
    """A world in which pairs cost less than single engines: those that answer compute slowly."""
    FakeTrtllm.kept.clear()
    with ExitStack() as stack:
        fakes = {name: stack.enter_context(running_trtllm(**options)) for name in names}
        engines = [
            EngineSettings(
                id=name, kind="tensorrt_llm", url=fake.url, role=ROLES[name], tokenizer=str(MODEL_DIR)
            )
            for name, fake in fakes.items()
        ]
        async with proxy_over(engines, tenants, interval_s=30.0) as made:
            world = PhasesWorld(*made, fakes)
            await world.settle()
            placer = world.proxy.fleet.pools["tiny"].placer
            for name in set(names) - {"p"}:
                placer.books[name].rates.pace = 5.0
                for _ in range(4):
                    placer.transfers.measured(monotonic(), "p", name, 1000, 0.001)
            yield world


class TestBothPhases:
    async def test_two_servers_answer_as_one_would(self):
        async with world_of() as world:
            for checked, (kind, (path, body)) in enumerate(KINDS.items()):
                alone = await world.alone(path, body)
                texts, record = await world.ask(path, body)
                assert texts == alone, kind
                assert (record.engine, record.prefilled_by, record.attempts) == ("d", "p", ["d"]), kind
                assert record.transfer is TransferResult.MOVED, kind
                assert FakeTrtllm.kept == {}
                assert record.reported_tokens == record.predicted_tokens == 0, kind
                await world.operate("flush", engine="d")
                texts, record = await world.ask(path, body)
                assert texts == alone, kind
                assert record.transfer is TransferResult.MOVED, kind
                assert record.reported_tokens == record.predicted_tokens > 700, kind
                audit = world.engine("p").audit.view()
                assert audit.checked == audit.exact == 2 * (checked + 1), kind
                await world.operate("flush", all=True)
            assert world.fakes["d"].fake.fetched > 2 * 700 * len(KINDS)

    async def test_both_phases_have_the_tenants_salt(self):
        async with world_of(tenants=("one", "two")) as world:
            for body in (chat(stream=True), chat()):
                _, record = await world.ask(CHAT, body, tenant="one")
                assert record.transfer is TransferResult.MOVED
                await world.operate("flush", all=True)
            sent = world.sent("p") + world.sent("d")
            assert len(sent) == 5
            assert len({body["cache_salt"] for body in sent}) == 1
            assert world.engine("p").adapter._poller.traffic.salted

    async def test_an_answer_that_ends_with_its_first_token(self):
        """Nothing is kept: the second server computes the prompt, too."""
        async with world_of() as world:
            world.fakes["p"].fake.ends_at_once = True
            for path, body in (STREAM, KINDS["completion"]):
                texts, record = await world.ask(path, body)
                assert texts == await world.alone(path, body)
                assert (record.attempts, record.transfer) == (["d"], TransferResult.FAILED)
                assert not world.engine("p").keeps_no_kv
                await world.operate("flush", all=True)
            assert world.fakes["d"].fake.fetched == 0


class TestClients:
    async def test_phases_of_a_client_are_its_own(self):
        async with world_of() as world:
            own = {"request_type": "context_only", "disagg_request_id": 1 << 50}
            _, record = await world.ask(COMPLETIONS, completion(disaggregated_params=own))
            assert record.prefilled_by is None
            assert FakeTrtllm.kept.keys() == {1 << 50}

    async def test_one_of_several_tenants_may_not_divide_its_requests(self):
        async with world_of(tenants=("one", "two")) as world:
            own = {"request_type": "generation_only", "disagg_request_id": 1 << 50}
            refused = await world.client.post(
                f"{world.url}/v1/{CHAT}",
                json=chat(disaggregated_params=own),
                headers={"authorization": f"Bearer {KEYS['one']}"},
            )
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "disaggregated_params")
            assert world.sent("p") == world.sent("d") == []


class TestFailures:
    async def answered(self, world: PhasesWorld, asking=None) -> RequestRecord:
        texts, record = await (asking or world.ask(*STREAM))
        assert texts == await world.alone(*STREAM)
        return record

    async def test_the_first_server_dies_before_its_kv_is_fetched(self):
        async with world_of(kv_transfer_timeout_s=0.1) as world:
            world.fakes["d"].fake.core.hold()
            asking = asyncio.ensure_future(world.ask(*STREAM))
            await until(lambda: bool(world.sent("d")))
            world.fakes["p"].fake.die()
            world.fakes["d"].fake.core.release()
            record = await self.answered(world, asking)
            assert record.attempts == ["d", "p"]

    async def test_a_server_that_waits_for_kv_in_vain_is_given_up(self, monkeypatch):
        monkeypatch.setattr(ContextPhase, "usable_s", 0.5)
        async with world_of() as world:
            world.fakes["d"].fake.core.hold()
            asking = asyncio.ensure_future(world.ask(*STREAM))
            await until(lambda: bool(world.sent("d")))
            world.fakes["p"].fake.die()
            world.fakes["d"].fake.core.release()
            record = await self.answered(world, asking)
            assert (record.attempts, record.past_legs) == (["d", "p"], [("p", TransferResult.LATE)])

    @pytest.mark.parametrize("kind", ["stream", "completion"])
    async def test_a_server_that_refuses_the_kv_is_no_fault_of_the_client(self, kind):
        path, body = KINDS[kind]
        async with world_of() as world:
            world.fakes["d"].fake.refuses_kv = True
            texts, record = await world.ask(path, body)
            assert texts == await world.alone(path, body)
            assert record.attempts == (["d", "p"] if kind == "stream" else ["d"])

    async def test_what_the_client_sent_wrong_is_told(self):
        """The first engine gets no options of streams: the second one refuses what is wrong with them."""
        async with world_of() as world:
            wrong = completion(stream=True, stream_options={"x": 1})
            refused = await world.client.post(f"{world.url}/v1/{COMPLETIONS}", json=wrong)
            assert refused.status_code == 400
            assert "extra_forbidden" in refused.json()["error"]["message"]
            await until(world.is_idle)
            assert world.last.attempts == ["d"]
            assert world.engine("d").breaker is None
