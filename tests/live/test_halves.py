"""Two SGLangs serve a request together, as neither can alone. Both are fakes that follow a real pair; the
adapter, the events and the whole of kvpin are real."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass

import httpx
import pytest
from starlette.routing import Route

from proxy.core.audit import Trust
from proxy.core.life import Rules
from proxy.core.placement.pairs import TransferResult
from proxy.fleet.engine import EngineState
from proxy.request.records import RequestRecord
from proxy.settings import EngineSettings
from tests.collector import collecting
from tests.fake_engines import sglang
from tests.fake_engines.sglang import RunningSglang, running_sglang
from tests.live.answers import texts_of
from tests.live.fake_world import FakeWorld, proxy_over, until

pytestmark = pytest.mark.usefixtures("nothing_lingers")

TEXT = " ".join(f"Entry {n}: all was well on this day." for n in range(30))
EVENTS = b"text/event-stream"
MODES = {"p": "prefill", "q": "prefill", "d": "decode", "e": "decode", "w": "null"}


def asked(text=TEXT, **fields):
    return {"model": "tiny", "prompt": text, "max_tokens": 6, "temperature": 0, **fields}


def route_of(server: RunningSglang) -> Route:
    (route,) = [each for each in server.fake.app.routes if each.path == "/v1/completions"]
    return route


def answers_after(server: RunningSglang, begun: threading.Event) -> None:
    route = route_of(server)
    serve = route.app

    async def app(scope, receive, send):
        await until(begun.is_set)
        await serve(scope, receive, send)

    route.app = app


def sends_a_comment_first(server: RunningSglang) -> None:
    """Its streams begin before it has the prompt's KV."""
    route = route_of(server)
    serve = route.app

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", EVENTS)]})
        await send({"type": "http.response.body", "body": b":\n\n", "more_body": True})

        async def go_on(message):
            if message["type"] == "http.response.body":
                await send(message)

        await serve(scope, receive, go_on)

    route.app = app


@dataclass(frozen=True)
class HalvesWorld(FakeWorld):
    """kvpin, and the fakes behind it by their names: `p` and `q` compute prompts, `d` and `e` answer; `w`
    does both."""

    fakes: dict[str, RunningSglang]

    def is_read(self, name: str) -> bool:
        if MODES[name] == "decode":
            return True
        view = self.engine(name).view
        seen = [view.counts.stored, view.counts.removed] if view is not None else None
        return self.engine(name).audit.trust is Trust.PRECISE and seen == self.fakes[name].told()

    def counts(self) -> dict[str, int]:
        """Chats and completions that each server got."""
        return {name: len(fake.fake.seen) for name, fake in self.fakes.items()}

    async def alone(self, path: str, body: dict) -> list[str]:
        """The texts of a single server's answer."""
        with running_sglang(page_size=16) as single:
            return texts_of(await self.client.post(f"{single.url}/{path}", json=body))

    async def ask(self, text=TEXT, **fields) -> tuple[httpx.Response, RequestRecord]:
        """The answer to a completion, and kvpin's record of it."""
        before = len(list(self.proxy.flow.requests))
        answer = await self.client.post(f"{self.url}/v1/completions", json=asked(text, **fields))
        await until(lambda: self.is_idle() and len(list(self.proxy.flow.requests)) > before)
        await self.settle_views()
        return answer, self.last

    async def settle_views(self) -> None:
        """Waits until kvpin has read all events."""
        for name in self.fakes:
            await until(lambda name=name: self.is_read(name))


@asynccontextmanager
async def world_of(
    names: str = "pd", *, reuse: bool = True, otel: bool = False
) -> AsyncIterator[HalvesWorld]:
    with ExitStack() as stack:
        fakes = {
            name: stack.enter_context(
                running_sglang(
                    page_size=16,
                    disaggregation_mode=MODES[name],
                    disaggregation_bootstrap_port=9000 + ord(name),
                    kv_events=MODES[name] != "decode",
                    disable_radix_cache=MODES[name] == "decode",
                )
            )
            for name in names
        }
        engines = [EngineSettings(id=name, kind="sglang", url=fake.url) for name, fake in fakes.items()]
        async with proxy_over(engines, (), interval_s=0.2, reuse=reuse, otel=otel) as made:
            world = HalvesWorld(*made, fakes)
            for name in names:
                await until(lambda name=name: world.is_quiet(name) and (not reuse or world.is_read(name)))
            yield world


CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": TEXT}],
    "max_tokens": 6,
    "temperature": 0,
}
KINDS = {
    "completion": ("v1/completions", asked()),
    "stream": ("v1/completions", asked(stream=True)),
    "chat": ("v1/chat/completions", CHAT),
    "chat stream": ("v1/chat/completions", CHAT | {"stream": True}),
    "generate": ("generate", {"text": TEXT, "sampling_params": {"max_new_tokens": 6}}),
}


class TestPair:
    async def test_both_answer_together_as_one_would(self):
        async with world_of() as world:
            for asked_before, (kind, (path, body)) in enumerate(KINDS.items()):
                expected = await world.alone(path, body)
                for turn in range(2):
                    await world.settle()
                    answer = await world.client.post(f"{world.url}/{path}", json=body)
                    assert texts_of(answer) == expected, kind
                    seen = 2 * asked_before + turn + 1
                    await until(
                        lambda seen=seen: world.is_idle() and len(list(world.proxy.flow.requests)) == seen
                    )
                    record = world.last
                    held = (len(record.prompt.token_ids) - 1) // 16 * 16 if turn else 0
                    assert (
                        record.reported_tokens == int(answer.headers["x-kvpin-predicted-tokens"]) == held
                    ), kind
                    assert (record.prefilled_by, record.transfer) == ("p", TransferResult.MOVED), kind
                    assert record.first_leg_s > 0
                await world.operate("flush", engine="p")
            assert world.engine("p").audit.view().exact == 2 * len(KINDS)
            assert world.counts() == {"p": 2 * len(KINDS), "d": 2 * len(KINDS)}
            rooms = [body["bootstrap_room"] for _, body in world.fakes["d"].fake.seen]
            assert len({*rooms}) == 2 * len(KINDS)
            assert all(0 < room < 2**63 for room in rooms)

    async def test_several_choices_and_prompts_are_requests_of_their_own(self):
        async with world_of() as world:
            answer = await world.post("completions", asked(["One text.", "Another text."], n=2))
            assert len(texts_of(answer)) == 4
            assert world.counts() == {"p": 4, "d": 4}

    async def test_generate_takes_one_prompt_and_gives_one_answer(self):
        async with world_of() as world:
            answer = await world.client.post(f"{world.url}/generate", json={"text": ["a", "b"]})
            assert answer.status_code == 400
            assert "text asks for several answers" in answer.text
            await until(world.is_idle)

    async def test_each_half_has_a_span(self, monkeypatch):
        with collecting() as collector:
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
            async with world_of(otel=True) as world:
                await world.ask()
        tree = [(depth, each.name, each.attributes.get("kvpin.engine")) for depth, each in collector.tree()]
        assert (1, "text_completion tiny", "d") in tree
        assert (2, "first leg", "p") in tree
        spans = {"p": collector.span("first leg"), "d": collector.span("text_completion tiny")}
        for name, span in spans.items():
            assert world.fakes[name].fake.parents[-1].startswith(f"00-{span.trace_id}-{span.span_id}-")

    async def test_kvpin_route_shows_the_pairs(self):
        async with world_of("pqd") as world:
            answer = await world.client.post(f"{world.url}/admin/v1/route", json=asked())
            found = answer.json()
            assert found["reason"] == "paired", answer.text
            pairs = {(each["prefiller"], each["engine"]) for each in found["candidates"]}
            assert pairs == {("p", "d"), ("q", "d")}

    async def test_the_prompts_tokens_are_asked_of_one_half(self):
        async with world_of() as world:
            answer = await world.client.post(f"{world.url}/tokenize", json={"model": "tiny", "prompt": "A b"})
            assert answer.status_code == 200, answer.text
            assert answer.json()["count"] == 2

    async def test_without_reuse_the_least_loaded_of_each_half_serve(self):
        """Also of requests that come at once: both engines count each as soon as it is placed."""
        async with world_of("pqde", reuse=False) as world:
            url = f"{world.url}/v1/completions"
            expected = await world.alone("v1/completions", asked())
            answers = await asyncio.gather(*(world.client.post(url, json=asked()) for _ in range(4)))
            assert [texts_of(answer) for answer in answers] == [expected] * 4
            assert world.counts() == {"p": 2, "q": 2, "d": 2, "e": 2}
            await until(world.is_idle)


class TestWarming:
    async def warmed(self, world, target) -> dict:
        body = {"prompt": TEXT} | target
        answer = await world.client.post(f"{world.url}/admin/v1/warm", json=body | {"wait_s": 10})
        return answer.json()

    async def test_reaches_the_engine_that_is_named(self):
        async with world_of("pqd") as world:
            done = await self.warmed(world, {"engine": "q"})
            assert [(part["engine"], part["state"]) for part in done["engines"]] == [("q", "done")]
            await world.settle_views()
            _, record = await world.ask()
            assert record.prefilled_by == "q"
            assert record.reported_tokens > 300

    async def test_reaches_all_that_compute_prompts(self):
        async with world_of("pqdw") as world:
            done = await self.warmed(world, {"engines": "all"})
            assert {part["engine"]: part["state"] for part in done["engines"]} == dict.fromkeys("pqw", "done")
            assert world.counts()["w"] == 1
            assert world.counts()["p"] == world.counts()["q"] == 1

    async def test_says_where_the_kv_is_and_where_none_can_be(self):
        async with world_of() as world:
            done = await self.warmed(world, {})
            assert [part["engine"] for part in done["engines"]] == ["p"]
            refused = await self.warmed(world, {"engine": "d"})
            assert refused["error"]["message"] == "engine 'd' computes no prompts: name one of p"


class TestGathering:
    async def test_prompts_of_one_beginning_that_come_at_once_compute_it_once(self, monkeypatch):
        monkeypatch.setattr(sglang, "_PREFILL_S", 0.1)
        async with world_of() as world:
            await asyncio.gather(*(world.post("completions", asked(f"{TEXT} And {n}.")) for n in range(6)))
            await until(lambda: world.is_idle() and len(list(world.proxy.flow.requests)) == 6)
            records = list(world.proxy.flow.requests)
            prompt = len(records[0].prompt.token_ids)
            computed = sum(len(each.prompt.token_ids) - each.reported_tokens for each in records)
            assert prompt > 300
            assert computed < prompt + 5 * 40


class TestChoice:
    async def test_the_prompt_goes_where_its_kv_is(self):
        async with world_of("pqde") as world:
            _, first = await world.ask()
            for n in range(3):
                _, record = await world.ask(f"{TEXT} And {n}.")
                assert record.prefilled_by == first.prefilled_by
                assert record.reported_tokens > 100

    async def test_a_prompt_is_computed_by_the_rank_whose_room_it_is(self):
        halves = {"page_size": 16, "disaggregation_bootstrap_port": 9000}
        with (
            running_sglang(**halves, disaggregation_mode="prefill", ranks=2) as p,
            running_sglang(**halves, disaggregation_mode="decode", kv_events=False) as d,
        ):
            engines = [EngineSettings(id=f"p{n}", kind="sglang", url=p.url, dp_rank=n) for n in range(2)]
            engines.append(EngineSettings(id="d", kind="sglang", url=d.url))
            async with proxy_over(engines, (), interval_s=0.2) as made:
                world = HalvesWorld(*made, {})
                await until(lambda: all(world.is_quiet(each.id) for each in engines))
                for number in range(3):
                    await world.ask(f"{number} {TEXT}")
                    assert (world.last.prefilled_by, world.last.attempts) == (f"p{p.fake.seen[-1][0]}", ["d"])
                url = f"{world.url}/v1/completions"
                await asyncio.gather(*(world.client.post(url, json=asked(f"{n}.")) for n in range(4)))
                assert {rank for rank, _ in p.fake.seen} == {0, 1}
                await until(world.is_idle)

    async def test_beside_one_that_is_whole(self):
        """It answers alone, or the pair does: whatever costs less."""
        async with world_of("pdw") as world:
            _, record = await world.ask()
            assert record.prefilled_by is None
            world.proxy.fleet.pools["tiny"].placer.books["w"].rates.pace = 50.0
            _, record = await world.ask(f"Another. {TEXT}")
            assert record.prefilled_by == "p"


class TestMissing:
    @pytest.mark.parametrize(
        ("names", "missing", "there"), [("p", "decode", "prefill"), ("d", "prefill", "decode")]
    )
    async def test_one_half_answers_nothing(self, names, missing, there):
        async with world_of(names) as world:
            answer = await world.post("completions", asked())
            assert answer.status_code == 503
            assert answer.json()["error"]["message"] == (
                f"no engine that does the {missing} half of requests is ready for this model, and those for "
                f"the {there} half cannot answer alone; try again shortly"
            )
            assert world.counts() == {names: 0}

    async def test_a_finding_says_so(self):
        async with world_of("p") as world:
            stats = (await world.client.get(f"{world.url}/admin/v1/engines")).text
            assert (
                "it does only the prefill half of each request, and no engine of its model the decode half"
                in stats
            )
        async with world_of("pd") as world:
            assert (
                "half of each request" not in (await world.client.get(f"{world.url}/admin/v1/engines")).text
            )

    async def test_a_half_that_comes_back_serves_again(self):
        async with world_of() as world:
            world.fakes["p"].fake.paused = True
            await until(lambda: world.engine("p").state is EngineState.DOWN)
            assert (await world.client.post(f"{world.url}/v1/completions", json=asked())).status_code == 503
            world.fakes["p"].fake.paused = False
            await until(lambda: world.engine("p").state is EngineState.READY)
            assert (await world.client.post(f"{world.url}/v1/completions", json=asked())).status_code == 200


class TestFaults:
    async def test_a_prompt_that_is_refused_goes_to_another_engine_for_prefills(self):
        """The one for decoding is not to blame: it is asked again."""
        async with world_of("pqd") as world:
            expected = await world.alone("v1/completions", asked())
            world.fakes["p"].fake.refuses = 500
            world.proxy.fleet.pools["tiny"].placer.books["q"].turn = 99
            answer, record = await world.ask(stream=True)
            assert texts_of(answer) == expected
            assert (record.attempts, record.prefilled_by) == (["d", "d"], "q")
            await until(lambda: world.fakes["d"].fake.aborted == 1)
            assert world.engine("p").breaker is not None
            assert world.engine("d").breaker is None

    async def test_of_one_pair_the_client_gets_the_refusal(self):
        async with world_of() as world:
            world.fakes["p"].fake.refuses = 503
            answer = await world.post("completions", asked())
            assert answer.status_code == 503
            assert "out of order" in answer.text
            await until(world.is_idle)

    async def test_an_engine_that_sends_comments_waits_no_longer_for_it(self):
        async with world_of() as world:
            begun = threading.Event()
            sends_a_comment_first(world.fakes["d"])
            answers_after(world.fakes["p"], begun)
            world.fakes["p"].fake.refuses = 503
            body = asked(stream=True, temperature=1)
            async with world.client.stream("POST", f"{world.url}/v1/completions", json=body) as answer:
                pieces = answer.aiter_bytes()
                assert (await anext(pieces)).startswith(b":")
                begun.set()
                with pytest.raises(httpx.RemoteProtocolError):
                    [each async for each in pieces]
            await until(world.is_idle)
            assert "out of order" in world.last.error
            await until(lambda: world.fakes["d"].fake.aborted == 1)

    async def test_an_error_about_the_request_is_passed_on(self):
        async with world_of() as world:
            world.fakes["p"].fake.refuses = 422
            answer = await world.post("completions", asked())
            assert answer.status_code == 422
            assert "out of order" in answer.text
            # On a busy machine, the error may come before the other half has reached its server.
            await until(lambda: world.is_idle() and world.fakes["d"].fake.aborted == world.counts()["d"])

    async def test_an_answer_that_is_refused_ends_the_prompt(self):
        async with world_of("pde") as world:
            expected = await world.alone("v1/completions", asked())
            world.fakes["d"].fake.refuses = 503
            world.proxy.fleet.pools["tiny"].placer.books["e"].turn = 99
            answer, record = await world.ask()
            assert texts_of(answer) == expected
            assert record.attempts == ["d", "e"]
            await until(lambda: world.fakes["p"].fake.aborted == 1)
            assert world.engine("p").breaker is None

    @pytest.mark.parametrize("name", ["p", "d"])
    async def test_the_client_leaves(self, name):
        async with world_of() as world:
            world.fakes[name].fake.hangs = True
            with pytest.raises(httpx.ReadTimeout):
                await world.client.post(f"{world.url}/v1/completions", json=asked(), timeout=0.5)
            await until(world.is_idle)
            await until(lambda: world.fakes["d"].fake.aborted == world.fakes[name].fake.aborted == 1)

    async def test_a_prompt_that_is_late_is_the_fault_of_its_engine(self):
        async with world_of("pqd") as world:
            expected = await world.alone("v1/completions", asked())
            world.fakes["p"].fake.hangs = True
            world.proxy.fleet.pools["tiny"].placer.books["q"].turn = 99
            object.__setattr__(world.proxy.flow, "rules", Rules(first_byte_s=1.0))
            answer, record = await world.ask()
            assert texts_of(answer) == expected
            assert (record.attempts, record.prefilled_by) == (["d", "d"], "q")

    async def test_a_lost_engine_for_prefills(self):
        async with world_of("pqd") as world:
            expected = await world.alone("v1/completions", asked())
            world.fakes["p"].fake.hangs = True
            world.proxy.fleet.pools["tiny"].placer.books["q"].turn = 99
            answer = asyncio.ensure_future(world.client.post(f"{world.url}/v1/completions", json=asked()))
            await until(lambda: world.counts()["p"] == 1)
            world.engine("p").abandon()
            assert texts_of(await answer) == expected
            await until(lambda: world.is_idle() and bool(list(world.proxy.flow.requests)))
            assert world.last.attempts == ["d", "d"]
            assert (world.engine("p").served, world.engine("p").failed) == (0, 1)
