"""One vLLM computes prompts, another one reads their KV and answers. Both are fakes that follow vLLM's wire
format; the adapter, the events and the whole of kvpin are real."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from random import Random
from time import monotonic
from types import MappingProxyType

import pytest
from msgspec.structs import replace

from engine_adapter import Role
from proxy.core.placement.pairs import TransferResult
from proxy.core.reasons import Reason, reason_of, why
from proxy.settings import EngineSettings
from tests.fake_engines.nixl import Found
from tests.fake_engines.vllm import RefusedError, running_vllm
from tests.live.answers import texts_of
from tests.live.fake_world import VllmWorld, proxy_over, until

pytestmark = pytest.mark.usefixtures("nothing_lingers")

# About 800 tokens.
TEXT = " ".join(f"Entry {n}: all was well on this day." for n in range(75))
ROLES = {"p": Role.PREFILL, "q": Role.PREFILL, "d": Role.DECODE, "e": Role.DECODE}
# Of engines that must be late: longer than a busy machine takes to fetch.
LEASE_S = 2.0
# Engines without a role: in dev mode, they say that they pass KV both ways.
BOTH = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}


def asked(text=TEXT, **fields):
    return {"prompt": text, "max_tokens": 6, "temperature": 0, "stream": True, **fields}


def events_of(answer: str) -> list[dict]:
    return [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]


def text_of(answer: str) -> str:
    return "".join(event["choices"][0].get("text") or "" for event in events_of(answer) if event["choices"])


def cached_of(answer: str) -> int | None:
    (usage,) = [event["usage"] for event in events_of(answer) if event.get("usage")]
    return usage["prompt_tokens_details"]["cached_tokens"]


@dataclass(frozen=True)
class PairWorld(VllmWorld):
    """kvpin, and the fakes behind it: `p` computes prompts, `d` and `e` answer; `a` and `b` have no role."""

    async def stream(self, text=TEXT, path="completions", **fields) -> str:
        """The whole answer of a stream, which ended well."""
        answer = await self.client.post(f"{self.url}/v1/{path}", json=asked(text, **fields))
        assert answer.status_code == 200, answer.text
        assert answer.text.endswith("data: [DONE]\n\n")
        assert '"error"' not in answer.text
        await until(self.is_idle)
        return answer.text

    def is_idle(self) -> bool:
        """Whether nothing is in flight or pending, here and in the ledgers."""
        index = self.proxy.fleet.pools["tiny"].index
        return super().is_idle() and not any(index.counts(name)[3] for name in self.fakes)

    async def alone(self, text=TEXT) -> str:
        """The text of a single engine's answer."""
        with running_vllm() as single:
            return text_of((await self.client.post(f"{single.url}/v1/completions", json=asked(text))).text)

    def nixl(self, name: str):
        return self.fakes[name].fake.nixl

    def sent(self, name: str) -> list[dict]:
        """Bodies that an engine got through kvpin, without those by which it was tried out."""
        return [
            body for _, body in self.fakes[name].fake.seen if body.get("max_tokens") and "prompt" in body
        ][1:]


@asynccontextmanager
async def world_of(
    *names: str,
    lease_s: float = 30.0,
    leases: Mapping[str, float] = MappingProxyType({}),
    tenants: tuple[str, ...] = (),
    pace: float = 5.0,
    **options,
) -> AsyncIterator[PairWorld]:
    """A world in which pairs cost less than single engines: those that answer compute slowly."""
    with ExitStack() as stack:
        fakes = {
            name: stack.enter_context(
                running_vllm(**({"nixl": True, "kv_lease_duration": lease_s} | options.get(name, {})))
            )
            for name in names
        }
        engines = [
            EngineSettings(
                id=name,
                kind="vllm",
                url=fake.url,
                role=ROLES.get(name, Role.BOTH),
                kv_lease_s=leases.get(name, lease_s + 5.0),
            )
            for name, fake in fakes.items()
        ]
        async with proxy_over(engines, tenants, interval_s=30.0) as made:
            world = PairWorld(*made, fakes)
            await world.settle()
            placer = world.proxy.fleet.pools["tiny"].placer
            for name in (name for name in names if ROLES.get(name) is Role.DECODE):
                placer.books[name].rates.pace = pace
                for source in ("p", "q") * 2:
                    placer.transfers.measured(monotonic(), source, name, 1000, 0.001)
            yield world


def crowd(world: PairWorld, busy: str) -> None:
    """That engine computes prompts all the time, and conversations are long: so their next turns wait there.
    The others compute slowly."""
    placer = world.proxy.fleet.pools["tiny"].placer
    own = placer.outlook
    placer.outlook = lambda now, spare=0.0: replace(own(now, spare), turns=5.0, rest_s=100.0)
    placer.books[busy].worked.add(monotonic(), 10_000.0)
    for name, book in placer.books.items():
        if name != busy:
            book.rates.pace = 1000.0
            for _ in range(2):
                placer.transfers.measured(monotonic(), busy, name, 1000, 0.001)


class TestWithoutRoles:
    """An engine reads the KV that another one holds; both compute prompts and answer."""

    async def test_one_engine_reads_what_another_holds(self):
        told = {"kv_transfer_config": BOTH}
        async with world_of("a", "b", a=told, b=told) as world:
            await world.stream()
            holder = world.last.engine
            other = "b" if holder == "a" else "a"
            await world.settle()
            crowd(world, holder)
            answer = await world.stream()
            record = world.last
            assert (record.engine, record.prefilled_by, record.attempts) == (other, holder, [other])
            assert record.transfer is TransferResult.MOVED
            assert reason_of(record.placement) is Reason.PAIRED
            assert f"{other} reads the KV of" in why(record.placement)
            assert text_of(answer) == await world.alone()
            assert world.nixl(other).found == [Found.THE_KV]
            assert record.predicted_tokens > 700
            audit = world.engine(holder).audit.view()
            assert audit.exact == audit.checked > 0

    async def test_an_engine_that_keeps_nothing_is_asked_once(self):
        told = {"kv_transfer_config": BOTH}
        async with world_of("a", "b", a=told | {"nixl": False}, b=told | {"nixl": False}) as world:
            await world.stream()
            holder = world.last.engine
            await world.settle()
            crowd(world, holder)
            await world.stream()
            assert (world.last.prefilled_by, world.last.transfer) == (holder, TransferResult.FAILED)
            assert world.engine(holder).keeps_no_kv
            world.proxy.fleet.pools["tiny"].index.wipe(world.last.engine)
            await world.stream()
            assert world.last.prefilled_by is None


class TestBothLegs:
    async def test_one_engine_computes_and_the_other_answers(self):
        async with world_of("p", "d") as world:
            answer = await world.stream()
            record = world.last
            assert text_of(answer) == await world.alone()
            assert (record.engine, record.prefilled_by, record.attempts) == ("d", "p", ["d"])
            assert record.transfer is TransferResult.MOVED
            assert reason_of(record.placement) is Reason.PAIRED
            assert record.first_leg_s > 0
            assert record.transfer_s > 0
            assert world.nixl("d").found == [Found.THE_KV]
            assert world.nixl("p").kept == {}
            parts = record.first_byte_parts
            assert sum(parts.values()) == pytest.approx(record.moments.began - record.moments.came)

    @pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
    async def test_chats_messages_and_responses_go_the_same_way(self, stream):
        async with world_of("p", "d") as world:
            ends = {
                "chat/completions": "\n\ndata: [DONE]",
                "messages": "event: message_stop",
                "responses": "event: response.completed",
            }
            for path, end in ends.items():
                text = f"{path}: {TEXT}"
                chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 4}
                body = {
                    "model": "tiny",
                    "stream": stream,
                    **({"input": text} if path == "responses" else chat),
                }
                answer = await world.client.post(f"{world.url}/v1/{path}", json=body)
                assert answer.status_code == 200, answer.text
                assert (end in answer.text) == stream, answer.text
                await until(world.is_idle)
                assert world.last.transfer is TransferResult.MOVED, path
            assert world.nixl("d").found == [Found.THE_KV] * 3

    async def test_the_client_is_told_what_the_first_engine_reused(self):
        async with world_of("p", "d") as world:
            usage = {"stream_options": {"include_usage": True}}
            assert cached_of(await world.stream(**usage)) == 0
            await world.settle()
            await world.operate("flush", engine="d")
            again = asked(f"{TEXT} And?", **usage)
            answer = await world.client.post(f"{world.url}/v1/completions", json=again)
            await until(world.is_idle)
            record = world.last
            assert record.transfer is TransferResult.MOVED
            assert cached_of(answer.text) == record.reported_tokens > 700
            assert int(answer.headers["x-kvpin-predicted-tokens"]) == record.reported_tokens
            audits = {name: world.engine(name).audit.view() for name in "pd"}
            assert (audits["p"].checked, audits["p"].exact) == (2, 2)
            # Each prediction is counted once: where the prompt was computed.
            assert (audits["d"].checked, audits["d"].unchecked) == (0, {})
            stats = (await world.client.get(f"{world.url}/admin/v1/stats")).json()
            ended = {each["id"]: (each["served"], each["prefilled"]) for each in stats["pools"][0]["engines"]}
            assert ended == {"p": (0, 2), "d": (2, 0)}
            assert stats["totals"]["served"] == 2

    async def test_pulled_blocks_are_in_the_view_so_the_next_turn_stays(self):
        async with world_of("p", "d") as world:
            await world.stream()
            await world.settle()
            turn = TEXT + " What then?"
            await world.stream(turn)
            record = world.last
            assert (record.engine, record.prefilled_by) == ("d", None)
            assert record.reported_tokens == record.predicted_tokens > 700
            assert len(world.sent("p")) == 1

    async def test_both_legs_have_the_tenants_salt(self):
        async with world_of("p", "d", tenants=("one", "two")) as world:
            answer = await world.client.post(
                f"{world.url}/v1/completions",
                json=asked(kv_hints={"actions": []}),
                headers={"authorization": "Bearer key-of-one"},
            )
            assert answer.status_code == 200
            await until(world.is_idle)
            assert world.last.transfer is TransferResult.MOVED
            (first,), (second,) = world.sent("p"), world.sent("d")
            assert first["cache_salt"] == second["cache_salt"]
            assert "kv_hints" not in second


class TestFetchedBefore:
    """Answers that do not show in time when the KV was fetched: a request for one token fetches it before."""

    @pytest.mark.parametrize("fields", [{"stream": False}, {"n": 2}, {"stream": False, "echo": True}])
    async def test_the_request_finds_the_kv_in_its_engines_cache(self, fields):
        async with world_of("p", "d") as world:
            answer = await world.client.post(f"{world.url}/v1/completions", json=asked(**fields))
            assert len(texts_of(answer)) == fields.get("n", 1)
            await until(world.is_idle)
            record = world.last
            assert (record.engine, record.prefilled_by, record.attempts) == ("d", "p", ["d"])
            assert record.transfer is TransferResult.MOVED
            assert min(record.first_leg_s, record.transfer_s) > 0
            (first,), (fetch, itself) = world.sent("p"), world.sent("d")
            assert first["kv_transfer_params"]["do_remote_decode"] is True
            assert (fetch["max_tokens"], fetch["stream"], fetch["prompt"]) == (1, False, first["prompt"])
            assert fetch["kv_transfer_params"]["remote_engine_id"] == world.nixl("p").id
            assert "kv_transfer_params" not in itself
            assert {name: itself[name] for name in fields} == fields
            assert world.nixl("d").found == [Found.THE_KV]
            assert world.nixl("p").kept == {}
            assert world.fakes["d"].core.cache.hits > 700, "it did not compute the prompt again"
            legs_s = pytest.approx(record.first_leg_s + record.transfer_s, abs=0.05)
            assert record.first_byte_parts["first leg"] == record.moments.legs_s == legs_s
            assert world.engine("d").ledger.in_flight == 0

    async def test_its_client_is_told_what_the_first_engine_reused(self):
        async with world_of("p", "d") as world:
            for expected in (0, 700):
                whole = asked(stream=False)
                answer = await world.client.post(f"{world.url}/v1/completions", json=whole)
                await until(world.is_idle)
                assert world.last.transfer is TransferResult.MOVED
                cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert cached == world.last.reported_tokens >= expected
                assert cached == int(answer.headers["x-kvpin-cached-tokens"])
                assert cached == int(answer.headers["x-kvpin-predicted-tokens"])
                await world.settle()
                await world.operate("flush", engine="d")
            assert world.engine("p").audit.view().exact == 2
            assert world.engine("d").audit.view().unchecked == {}

    async def test_an_engine_that_refuses_to_fetch_computes_the_prompt(self):
        async with world_of("p", "d") as world:
            fake = world.fakes["d"].fake

            async def refuse(*_):
                raise RefusedError("kv_load_failure_policy is fail", status=500)

            fake._pulled = refuse
            answer = await world.client.post(f"{world.url}/v1/completions", json=asked(stream=False))
            await until(world.is_idle)
            assert answer.json()["choices"][0]["text"] == await world.alone()
            assert (world.last.attempts, world.last.transfer) == (["d"], TransferResult.FAILED)
            cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == world.last.reported_tokens == 0

    async def test_a_fetch_that_comes_too_late_ends_the_attempt(self):
        async with world_of("p", "d", lease_s=LEASE_S) as world:
            world.fakes["d"].core.hold()
            asking = asyncio.ensure_future(
                world.client.post(f"{world.url}/v1/completions", json=asked(stream=False), timeout=30)
            )
            await until(lambda: bool(world.sent("d")))
            await asyncio.sleep(1.4 * LEASE_S)
            world.fakes["d"].core.release()
            answer = await asking
            assert answer.json()["choices"][0]["text"] == await world.alone()
            await until(world.is_idle)
            assert (world.last.attempts, world.last.past_legs) == (["d", "p"], [("p", TransferResult.LATE)])
            assert len(world.sent("d")) == 1, "the request itself was not sent there"


class TestAdded:
    async def test_an_engine_for_prefills_may_come_later(self):
        async with world_of("d") as world:
            with running_vllm(nixl=True) as late:
                named = {"kind": "vllm", "url": late.url, "id": "p", "role": "prefill"}
                added = await world.client.post(f"{world.url}/admin/v1/engines", json=named)
                assert (added.status_code, added.json()["role"]) == (201, "prefill")
                world.fakes["p"] = late
                await world.settle()
                await world.stream()
                assert (world.last.engine, world.last.prefilled_by) == ("d", "p")


class TestAlone:
    async def test_where_no_other_engine_may_be_tried(self):
        async with world_of("p", "d") as world:
            flow = world.proxy.flow
            object.__setattr__(flow, "rules", replace(flow.rules, retries=0))
            await world.stream()
            assert (world.last.engine, world.last.prefilled_by) == ("d", None)


class TestFirstEngineFails:
    async def served_by_the_other(self, world):
        answer = await world.stream()
        record = world.last
        assert text_of(answer) == await world.alone()
        assert (record.engine, record.attempts, record.interrupted) == ("d", ["d"], 0)
        assert (record.prefilled_by, record.transfer) == ("p", TransferResult.FAILED)
        assert "kv_transfer_params" not in world.sent("d")[-1]
        assert world.nixl("d").found == []
        assert (record.predicted_tokens, record.reported_tokens) == (0, 0)

    async def test_by_dying(self):
        async with world_of("p", "d") as world:
            fake = world.fakes["p"].fake

            async def die(*_):
                raise OSError

            fake._first_leg = die
            await self.served_by_the_other(world)
            assert world.engine("p").breaker is not None

    async def test_by_being_late(self):
        async with world_of("p", "d") as world:
            world.fakes["p"].core.hold()
            began = monotonic()
            await self.served_by_the_other(world)
            assert monotonic() - began < 10
            await until(lambda: world.nixl("p").left == 1)
            world.fakes["p"].core.release()
            await until(lambda: world.nixl("p").aborted == 1)
            assert world.nixl("p").kept == {}

    async def test_by_being_lost(self):
        async with world_of("p", "d") as world:
            world.fakes["p"].core.hold()
            serving = asyncio.ensure_future(self.served_by_the_other(world))
            await until(lambda: bool(world.engine("p").leases))
            world.engine("p").abandon()
            await asyncio.sleep(0)
            world.engine("p").abandon()  # its monitor says so again at each attempt to connect
            await serving
            world.fakes["p"].core.release()

    async def test_by_keeping_nothing(self):
        async with world_of("p", "d", p={"nixl": False}) as world:
            await self.served_by_the_other(world)
            assert world.engine("p").keeps_no_kv
            told = (await world.client.get(f"{world.url}/admin/v1/engines")).json()["engines"]
            (findings,) = [engine["findings"] for engine in told if engine["id"] == "p"]
            assert "--kv-transfer-config" in findings[0]
            await world.stream("Another one. " + TEXT)
            assert world.last.prefilled_by is None


class TestSecondEngineFails:
    async def test_another_one_reads_the_prompt_that_the_first_engine_still_holds(self):
        async with world_of("p", "d", "e") as world:
            expected = await world.alone()
            for name in "de":
                world.fakes[name].core.hold()
            asking = asyncio.ensure_future(world.stream())
            await until(lambda: bool(world.sent("d") or world.sent("e")))
            died = "d" if world.sent("d") else "e"
            other = "e" if died == "d" else "d"
            world.fakes[other].core.release()
            world.engine(died).abandon()
            assert text_of(await asking) == expected
            world.fakes[died].core.release()
            record = world.last
            assert record.attempts == [died, other]
            assert (record.prefilled_by, record.transfer) == ("p", TransferResult.MOVED)
            assert record.reported_tokens == record.predicted_tokens > 700, "the second time, p held it"
            assert world.nixl(other).found == [Found.THE_KV]

    async def test_what_the_client_sent_wrong_is_told(self):
        """The first engine takes it: that one gets another limit."""
        async with world_of("p", "d") as world:
            answer = await world.client.post(f"{world.url}/v1/completions", json=asked(max_tokens=2000))
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "max_tokens"
            await until(world.is_idle)
            assert (world.last.attempts, world.last.prefilled_by) == (["d"], "p")
            assert world.engine("d").breaker is None


class TestTheClientLeaves:
    async def leaves(self, world, when):
        """A client that leaves as soon as `when` holds."""
        asking = asyncio.ensure_future(
            world.client.post(f"{world.url}/v1/completions", json=asked(), timeout=30)
        )
        await until(when)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(world.is_idle)

    async def test_during_the_first_leg(self):
        async with world_of("p", "d") as world:
            world.fakes["p"].core.hold()
            await self.leaves(world, lambda: bool(world.sent("p")))
            await until(lambda: world.nixl("p").left == 1)
            world.fakes["p"].core.release()
            await until(lambda: world.nixl("p").aborted == 1)
            assert world.sent("d") == []
            assert world.nixl("p").kept == {}
            assert world.last.status == 499

    async def test_during_the_second_leg(self):
        async with world_of("p", "d") as world:
            world.fakes["d"].core.hold(after=1)
            await self.leaves(world, lambda: world.nixl("d").found == [Found.THE_KV])
            world.fakes["d"].core.release()
            assert world.nixl("p").kept == {}


class TestTheLease:
    async def test_an_engine_that_stopped_answers_from_no_kv_that_may_be_gone(self):
        """The second engine stands still until the lease is over, and goes on then. Its answer would be one
        from the KV of somebody else, with status 200."""
        async with world_of("p", "d", lease_s=LEASE_S) as world:
            expected = await world.alone()
            world.fakes["d"].core.hold()
            asking = asyncio.ensure_future(
                world.client.post(f"{world.url}/v1/completions", json=asked(), timeout=30)
            )
            await until(lambda: bool(world.sent("d")))
            await asyncio.sleep(1.4 * LEASE_S)
            world.fakes["d"].core.release()
            answer = await asking
            assert text_of(answer.text) == expected
            assert answer.text.endswith("data: [DONE]\n\n")
            await until(lambda: world.nixl("d").found == [Found.OTHER_KV])  # else this tests nothing
            await until(world.is_idle)
            record = world.last
            assert record.attempts == ["d", "p"]
            assert record.past_legs == [("p", TransferResult.LATE)]
            assert (record.prefilled_by, record.transfer, record.first_leg_s) == (None, None, None)
            page = (await world.client.get(f"{world.url}/metrics")).text
            assert 'kvpin_transfers_total{model="tiny",prefiller="p",result="late"} 1' in page


class TestChaos:
    """Engines stop and go on, are lost, and clients leave, all at random, with short leases."""

    REQUESTS = 60

    async def ask(self, world, number: int, random: Random) -> tuple[str, str | None]:
        """One request: its prompt, and its text if its client stayed."""
        text = f"{number % 20} {TEXT} {number}"
        await asyncio.sleep(random.uniform(0, 2.5))
        patience_s = (0.05, 0.3, 30, 30, 30)[number % 5]  # most stay, however busy the machine is
        streams = number % 3 > 0
        asking = world.client.post(f"{world.url}/v1/completions", json=asked(text, stream=streams))
        try:
            answer = await asyncio.wait_for(asking, patience_s)
        except TimeoutError:
            return text, None
        assert answer.status_code == 200, answer.text
        if not streams:
            return text, answer.json()["choices"][0]["text"]
        assert answer.text.endswith("data: [DONE]\n\n"), answer.text[-300:]
        return text, text_of(answer.text)

    async def trouble(self, world, random: Random) -> None:
        """One engine after the other stands still for a while; some are lost."""
        while True:
            name = random.choice(tuple(world.fakes))
            core = world.fakes[name].core
            core.hold(after=random.choice((0, 0, 2)))
            if random.random() < 0.3:
                world.engine(name).abandon()
            await asyncio.sleep(random.uniform(0.1, 1.0))
            core.release()
            await asyncio.sleep(random.uniform(0, 0.2))

    async def test_no_answer_is_wrong_and_nothing_is_left(self):
        random = Random(1)  # noqa: S311 - a test
        async with world_of("p", "q", "d", "e", lease_s=0.5) as world:
            with running_vllm() as single:
                trouble = asyncio.ensure_future(self.trouble(world, random))
                answers = await asyncio.gather(
                    *(self.ask(world, number, random) for number in range(self.REQUESTS))
                )
                trouble.cancel()
                for fake in world.fakes.values():
                    fake.core.release()
                await until(world.is_idle)
                for text, answer in answers:
                    if answer is not None:
                        alone = await world.client.post(f"{single.url}/v1/completions", json=asked(text))
                        assert answer == text_of(alone.text), text[:20]
            assert sum(answer is not None for _, answer in answers) > self.REQUESTS / 2
            results = Counter(record.transfer for record in world.proxy.flow.requests)
            assert results[TransferResult.MOVED] > 5, results
            await until(lambda: all(not world.nixl(name).held for name in "pq"))
