"""The models of a router: their states, and swaps in which no request and no slot is lost."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from engine_adapter import (
    EngineRejected,
    EngineSpec,
    EngineSpecError,
    EngineUnavailable,
    ModelFailed,
    ModelNotLoaded,
    ModelState,
)
from engine_adapter.http.control import ControlClient
from engine_adapter.llama_server import router as router_module
from engine_adapter.llama_server.options import LlamaServerOptions
from engine_adapter.llama_server.router import MAX_TOKENISING, Router, ServerClient
from engine_adapter.llama_server.slot_io import read_pulse
from tests.engines import served
from tests.kv_world import until


class FakeRouter:
    """Answers as llama.cpp's router does, without models. What it was asked stands in `asked`."""

    def __init__(self, *names: str) -> None:
        self.states: dict[str, dict[str, Any]] = {name: {"value": "unloaded"} for name in names}
        self.most, self.events = 1, True
        self.asked: list[str] = []
        self.broken = ""
        self.stuck = ""  # loads for ever
        self.says: list[str] = []  # refusals of further loads
        self.role = "router"
        self.changes = 0
        self.told = ""  # the model of the latest change
        self.app = Starlette(
            routes=[
                Route("/props", self.props),
                Route("/models", self.models),
                Route("/models/sse", self.sse),
                Route("/models/load", self.load, methods=["POST"]),
                Route("/models/unload", self.unload, methods=["POST"]),
                Route("/echo", self.echo, methods=["GET", "POST"]),
            ]
        )

    def set(self, name: str, value: str, **more: Any) -> None:
        port = str(1000 + len(self.asked))
        args = ["llama-server", "--port", port, "--cache-ram", "0"] if value in ("loaded", "loading") else []
        self.states[name] = {"value": value, "args": args or self.states[name].get("args", []), **more}
        self.told = name
        self.changes += 1

    async def props(self, _request: Request) -> Response:
        return JSONResponse({"role": self.role, "max_instances": self.most})

    async def models(self, _request: Request) -> Response:
        data = [{"id": name, "status": status, "source": "dir"} for name, status in self.states.items()]
        return JSONResponse({"data": data})

    async def sse(self, _request: Request) -> Response:
        if not self.events:
            return Response(status_code=404)

        async def events() -> AsyncIterator[str]:
            seen = self.changes
            while True:
                if seen != self.changes:
                    seen = self.changes
                    told = {"model": self.told, "event": "status_change"}
                    yield f"data: {msgspec.json.encode(told).decode()}\n\n"
                await asyncio.sleep(0.005)  # tests change it from another thread

        return StreamingResponse(events(), media_type="text/event-stream")

    async def load(self, request: Request) -> Response:
        name = (await request.json())["model"]
        self.asked.append(f"load {name}")
        if self.says:
            return JSONResponse({"error": {"message": self.says.pop()}}, 500)
        if self.states[name]["value"] != "unloaded":
            return JSONResponse({"error": {"message": "already running"}}, 400)
        if name == self.broken:
            self.set(name, "unloaded", failed=True, exit_code=1)
        elif name == self.stuck:
            self.set(name, "loading")
        else:
            self.set(name, "loaded")
        return JSONResponse({"success": True})

    async def unload(self, request: Request) -> Response:
        name = (await request.json())["model"]
        self.asked.append(f"unload {name}")
        self.set(name, "unloaded")
        return JSONResponse({"success": True})

    async def echo(self, request: Request) -> Response:
        body = await request.body()
        return JSONResponse({"query": str(request.url.query), "body": body.decode()})


class Adapter:
    """Notes what the router tells it."""

    def __init__(self, fake: FakeRouter, name: str) -> None:
        self.fake, self.name = fake, name

    async def end_session(self, *, farewell: bool) -> None:
        self.fake.asked.append(f"{'save' if farewell else 'gone'} {self.name}")


Routing = AsyncIterator[tuple[FakeRouter, Router]]


@asynccontextmanager
async def routing(*names: str, load_s: float = 60.0, **fields: Any) -> Routing:
    """A fake router of these models with these attributes, and kvpin's view of it."""
    fake = FakeRouter(*names)
    for name, value in fields.items():
        setattr(fake, name, value)
    with served(fake.app) as url:
        spec = EngineSpec("llama_server", url, "e", options=LlamaServerOptions(load_s=load_s))
        async with aclosing(ControlClient(spec)) as control:
            router = Router.at(spec, await read_pulse(control))
            assert router is not None
            assert Router.at(spec, await read_pulse(control)) is router
            adapters = {name: Adapter(fake, name) for name in names}
            for name, adapter in adapters.items():
                router.join(name, adapter.end_session)
            await router.refresh()
            try:
                yield fake, router
            finally:
                for name, adapter in adapters.items():
                    await router.leave(name, adapter.end_session)


async def ask(router: Router, name: str, order: list[str] | None = None) -> None:
    """A request; `order` gets its name when it runs."""
    async with router.using(name):
        if order is not None:
            order.append(name)


async def until_loading(router: Router, name: str) -> None:
    """Returns when kvpin has heard that a model is loading."""
    async with asyncio.timeout(20):
        while router.state(name) is not ModelState.LOADING:  # noqa: ASYNC110 - the fake runs in a thread
            await asyncio.sleep(0.005)


class Clock:
    now = 1000.0


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(router_module, "monotonic", lambda: clock.now)
    return clock


async def tell_progress(fake: FakeRouter, router: Router, clock: Clock, name: str) -> None:
    """The fake tells that a model makes progress, and kvpin has heard it."""
    fake.told = name
    async with asyncio.timeout(20):
        while router._heard.get(name) != clock.now:  # the router may not be followed yet
            fake.changes += 1
            await asyncio.sleep(0.01)


async def test_a_model_is_loaded_for_its_requests_and_the_least_used_one_is_saved_and_ended():
    async with routing("a", "b", "c", most=2) as (fake, router):
        assert router.states == dict.fromkeys("abc", ModelState.UNLOADED)
        for name in "abaca":
            async with router.using(name):
                assert router.state(name) is ModelState.LOADED
        assert fake.asked == ["load a", "load b", "save b", "unload b", "gone b", "load c"]
        assert router.card("a") == {"status": {"value": "loaded"}, "source": "dir"}
        assert router.load_s("a") == 0 < router.load_s("b")


async def test_a_model_does_not_leave_before_its_requests_have_ended_and_takes_no_more_meanwhile():
    async with routing("a", "b") as (_, router):
        order: list[str] = []
        async with router.using("a"):
            asks = [asyncio.create_task(ask(router, name, order)) for name in "ba"]
            await asyncio.sleep(0.05)
            assert not order
            assert not router.is_open("a")
        await asyncio.gather(*asks)
        assert order == ["b", "a"]


async def test_a_slow_request_stops_neither_others_of_its_model_nor_a_swap_for_ever(monkeypatch):
    monkeypatch.setattr(router_module, "_DRAIN_S", 0.1)
    async with routing("a", "b") as (fake, router):
        async with router.using("a"):
            swap = asyncio.create_task(ask(router, "b"))
            await asyncio.sleep(0.02)
            assert not router.is_open("a")
            async with asyncio.timeout(5):
                for _ in range(3):
                    await ask(router, "a")
            assert not swap.done()
            assert fake.asked == ["load a"]
        await swap
        assert fake.asked == ["load a", "save a", "unload a", "gone a", "load b"]


async def test_who_waits_while_all_models_load_waits_not_for_ever(clock):
    async with routing("a", "b", stuck="a", load_s=0.3) as (fake, router):
        loads, waits = (asyncio.create_task(ask(router, name)) for name in "ab")
        await tell_progress(fake, router, clock, "a")
        for _ in range(2):
            clock.now += 0.2
            await tell_progress(fake, router, clock, "a")
        with pytest.raises(EngineRejected, match=r"no room for the model 'b' for 0\.3 s") as refused:
            await waits
        assert refused.value.status == 503
        assert not loads.done()
        loads.cancel()
        await asyncio.wait([loads])


async def test_who_leaves_while_it_waits_costs_no_model():
    async with routing("a", "b") as (fake, router), router.using("a"):
        waits = asyncio.create_task(ask(router, "b"))
        await asyncio.sleep(0.05)
        waits.cancel()
        await asyncio.wait([waits])
        assert router.is_open("a")
        assert fake.asked == ["load a"]


async def test_a_model_that_failed_to_load_is_refused_with_the_reason_and_puts_out_no_other():
    async with routing("a", "b", broken="b") as (fake, router):
        await ask(router, "a")
        for _ in range(2):
            asks = [ask(router, "b") for _ in range(5)]
            for refused in await asyncio.gather(*asks, return_exceptions=True):
                assert isinstance(refused, ModelFailed)
                assert re.fullmatch(r"the model 'b' failed to load: .* status 1, .*", str(refused))
                assert refused.status == 424
            assert router.state("b") is ModelState.FAILED
            await ask(router, "a")
        assert fake.asked == ["load a", "save a", "unload a", "gone a", "load b", "load a"]


async def test_a_model_that_failed_to_load_is_tried_again_at_an_operators_wish():
    async with routing("a", "b", broken="b") as (fake, router):
        for _ in range(2):
            router.try_again("b")
            with pytest.raises(ModelFailed):
                await ask(router, "b")
        assert fake.asked == ["load b"] * 2
        fake.broken = ""
        router.try_again("b")
        await ask(router, "b")
        assert router.failure("b") is None


@pytest.mark.parametrize(("flags", "is_mended"), [(["-c", "9"], True), ([], False)])
async def test_a_model_that_failed_to_load_is_tried_again_once_its_flags_have_changed(flags, is_mended):
    """A router that was restarted tells those that its operator has mended, and another port in any case."""
    async with routing("a", "b", broken="b") as (fake, router):
        fake.states["b"]["args"] = ["llama-server", "--port", "0"]
        await router.refresh()
        with pytest.raises(ModelFailed):
            await ask(router, "b")
        fake.broken = ""
        fake.states["b"] = {"value": "unloaded", "args": ["llama-server", "--port", "1", *flags]}
        await router.refresh()
        assert (router.failure("b") is None) is is_mended
        if is_mended:
            await ask(router, "b")


async def test_each_failure_of_a_model_doubles_the_pause_after_it(clock):
    async with routing("a", broken="a") as (fake, router):
        tried = []
        while clock.now < 2800.0:
            before = len(fake.asked)
            with pytest.raises(ModelFailed):
                await ask(router, "a")
            if len(fake.asked) > before:
                tried.append(clock.now - 1000.0)
            clock.now += 10.0
        assert tried == [0.0, 10.0, 30.0, 70.0, 150.0, 310.0, 630.0, 1230.0]


async def test_a_load_that_tells_nothing_has_failed_and_is_ended():
    async with routing("a", "b", stuck="b", load_s=1.0) as (fake, router):
        stuck = [asyncio.create_task(ask(router, "b")) for _ in range(3)]
        await until_loading(router, "b")
        await asyncio.sleep(0.5)
        await ask(router, "a")  # there is no room for it before
        failures = await asyncio.gather(*stuck, return_exceptions=True)
        assert str(failures[0]) == (
            "the model 'b' failed to load: its llama-server has told no progress for 1 s; look for it "
            "in the router's presets, or raise load_s"
        )
        assert len({str(failure) for failure in failures}) == 1
        assert {type(failure) for failure in failures} == {ModelFailed}
        assert router.failure("b") == str(failures[0])
        assert fake.asked.count("load b") == 1
        assert "unload b" in fake.asked
        assert router.is_open("a")


async def test_a_load_that_tells_its_progress_may_take_longer(clock):
    async with routing("a", stuck="a", load_s=2.0) as (fake, router):
        loading = asyncio.create_task(ask(router, "a"))
        await tell_progress(fake, router, clock, "a")
        for _ in range(3):
            clock.now += 1.5
            await tell_progress(fake, router, clock, "a")
        fake.set("a", "loaded")
        await loading
        assert fake.asked == ["load a"]


async def test_other_models_are_served_and_loaded_while_one_loads():
    async with routing("a", "b", "c", most=3, stuck="b") as (fake, router):
        await ask(router, "a")
        stuck = asyncio.create_task(ask(router, "b"))
        await until(lambda: "load b" in fake.asked)
        await ask(router, "a")
        await ask(router, "c")
        assert not stuck.done()
        assert fake.asked == ["load a", "load b", "load c"]
        fake.set("b", "loaded")
        await stuck


async def test_a_model_that_loads_for_a_request_does_not_leave_before_it_has_served_it():
    async with routing("a", "b", stuck="b") as (fake, router):
        order: list[str] = []
        asks = []
        for name in "ba":
            asks.append(asyncio.create_task(ask(router, name, order)))
            await until(lambda: "load b" in fake.asked)
        await asyncio.sleep(0.05)
        fake.set("b", "loaded")
        await asyncio.gather(*asks)
        assert order == ["b", "a"]


async def test_a_load_that_nobody_waits_for_any_longer_makes_room():
    async with routing("a", "b", stuck="b") as (fake, router):
        stuck = asyncio.create_task(ask(router, "b"))
        await until_loading(router, "b")
        stuck.cancel()
        await asyncio.wait([stuck])
        await ask(router, "a")
        assert fake.asked == ["load b", "save b", "unload b", "gone b", "load a"]


async def test_any_other_error_of_a_load_is_the_models():
    async with routing("a", "b", says=["failed to spawn server instance"]) as (fake, router):
        for _ in range(2):
            with pytest.raises(ModelFailed, match="'b' cannot be loaded: failed to spawn"):
                await ask(router, "b")
        assert fake.asked == ["load b"]
        await ask(router, "a")


async def test_a_visit_waits_for_a_request_to_load_the_model_and_a_swap_waits_for_the_visit():
    """However short the model stays."""
    async with routing("a", "b") as (fake, router):
        with pytest.raises(ModelNotLoaded, match="'a' is not loaded"):
            async with router.visiting("a", 0.01):
                pass
        assert fake.asked == []
        visited, done = asyncio.Event(), asyncio.Event()

        async def visit() -> None:
            async with router.visiting("a", 5.0):
                visited.set()
                await done.wait()
                fake.asked.append("visited")

        visits = asyncio.create_task(visit())
        await asyncio.sleep(0.02)
        await ask(router, "a")
        swap = asyncio.create_task(ask(router, "b"))
        await asyncio.sleep(0.05)
        assert visited.is_set()
        assert fake.asked == ["load a"]
        done.set()
        await asyncio.gather(visits, swap)
        assert fake.asked == ["load a", "visited", "save a", "unload a", "gone a", "load b"]


async def test_a_swap_waits_for_a_visit_only_briefly_and_for_a_request_to_its_end(monkeypatch):
    monkeypatch.setattr(router_module, "_QUESTIONS_S", 0.02)
    async with routing("a", "b") as (fake, router), router.using("a"):
        async with router.visiting("a", 1.0):
            swap = asyncio.create_task(ask(router, "b"))
            await asyncio.sleep(0.1)
            assert fake.asked == ["load a"]
        swap.cancel()
        await asyncio.wait([swap])
    async with routing("a", "b") as (_, router):
        await ask(router, "a")
        async with router.visiting("a", 1.0), router.using("b"):
            assert router.state("a") is ModelState.UNLOADED


async def test_a_router_without_room_is_asked_again_but_not_for_ever(monkeypatch):
    monkeypatch.setattr(router_module, "_RETRY_S", 0.0)
    async with routing("a", "b", most=2, says=["model limit reached"] * 2) as (fake, router):
        await ask(router, "a")
        assert fake.asked == ["load a"] * 3
        monkeypatch.setattr(router_module, "_ROOM_S", 0.05)
        fake.says = ["model limit reached"] * 1000
        with pytest.raises(EngineRejected, match=r"no room for the model 'b' for 0\.05 s") as refused:
            await ask(router, "b")
        assert refused.value.status == 503
        await ask(router, "a")


async def test_a_model_that_another_client_loads_is_waited_for_also_without_events(monkeypatch):
    monkeypatch.setattr(router_module, "_LOOK_S", 0.02)
    async with routing("a", events=False) as (fake, router):
        fake.set("a", "loading")
        await router.refresh()
        waits = asyncio.create_task(ask(router, "a"))
        await asyncio.sleep(0.05)
        assert not waits.done()
        fake.set("a", "loaded")
        await waits
        assert fake.asked == []


async def test_a_model_that_is_gone_is_one_sentence():
    async with routing("a") as (_, router):
        with pytest.raises(EngineSpecError, match="no model 'x'; it has a"):
            router.model("x")
        with pytest.raises(EngineRejected, match="no longer has the model 'x'"):
            await ask(router, "x")
        assert not await router.has("a")


async def test_the_end_of_a_process_is_told_even_if_another_has_taken_its_place():
    async with routing("a") as (fake, router):
        await ask(router, "a")
        fake.asked.append("crash")
        fake.set("a", "loaded")
        await router.refresh()
        assert fake.asked == ["load a", "crash", "gone a"]
        await router.refresh()
        assert fake.asked[3:] == []
        fake.set("a", "downloaded")
        await router.refresh()
        assert router.state("a") is ModelState.UNLOADED, "as with any word that kvpin does not know"


async def test_what_is_no_router_is_none():
    fake = FakeRouter("a")
    fake.role = ""
    with served(fake.app) as url:
        spec = EngineSpec("llama_server", url, "e", options=LlamaServerOptions())
        control = ControlClient(spec)
        assert Router.at(spec, await read_pulse(control)) is None
        fake.role = "router"
        router = Router.at(spec, await read_pulse(control))
        assert router is not None
        fake.states["a"] = {"value": 1}
        with pytest.raises(EngineUnavailable, match="not as expected"):
            await router.refresh()
        await control.aclose()


async def test_a_burst_of_prompts_takes_few_of_the_servers_threads():
    now = most = 0

    async def tokenize(_request: Request) -> Response:
        nonlocal now, most
        now, most = now + 1, max(most, now + 1)
        await asyncio.sleep(0.01)
        now -= 1
        return JSONResponse({"tokens": []})

    with served(Starlette(routes=[Route("/tokenize", tokenize, methods=["POST"])])) as url:
        async with aclosing(ServerClient(EngineSpec("llama_server", url, "e"))) as client:
            asked = [client.call("POST", "/tokenize", json={"content": str(n)}) for n in range(16)]
            assert await asyncio.gather(*asked) == [{"tokens": []}] * 16
    assert most == MAX_TOKENISING


async def test_a_call_names_its_model_and_loads_none():
    fake = FakeRouter("a")
    with served(fake.app) as url:
        client = ServerClient(EngineSpec("llama_server", url, "e"))
        assert await client.get("/echo") == {"query": "", "body": ""}
        client.model = "org/a&b:Q8"
        query = "autoload=false&model=org%2Fa%26b%3AQ8"
        assert (await client.get("/echo"))["query"] == query
        told = await client.call("POST", "/echo?x=1", json={"y": 2})
        assert told["query"] == f"x=1&{query}"
        assert msgspec.json.decode(told["body"]) == {"model": "org/a&b:Q8", "y": 2}
        for empty in (b"{}", b" { }\n"):
            told = await client.call("POST", "/echo", content=empty)
            assert msgspec.json.decode(told["body"]) == {"model": "org/a&b:Q8"}
        told = await client.call("POST", "/echo", content=b'\n{ "y": 2}')  # as a client wrote it
        assert msgspec.json.decode(told["body"]) == {"model": "org/a&b:Q8", "y": 2}
        await client.aclose()
