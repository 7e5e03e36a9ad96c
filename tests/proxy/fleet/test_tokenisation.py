import asyncio
from array import array
from dataclasses import replace

import pytest
import structlog

from engine_adapter import Capability, EngineSpecError, EngineUnavailable, JsonBody, ModelNotLoaded
from engine_adapter.prompt.chat import ChatTokenizer
from engine_adapter.prompt.forms import Form
from proxy.fleet import tokenisation
from proxy.fleet.engine import EngineState
from proxy.fleet.fleet import Fleet
from proxy.fleet.tokenisation import PoolTokenizers
from proxy.prompt import PromptTables
from proxy.runtime.tasks import Supervisor
from tests.fakes import INFO, FakeAdapter

COMPLETIONS = "/v1/completions"
ASKABLE = replace(INFO, tokenizer="acme/model", capabilities=frozenset({Capability.TOKENIZE}))
BODY = JsonBody(b'{"prompt": "hello"}')


class Loader:
    """Stands for what loads tokenizers: it counts, and waits until it is let go."""

    def __init__(self, tokenizer=None):
        self.tokenizer = tokenizer
        self.sources = []
        self.failures = []
        self.go = asyncio.Event()

    async def __call__(self, source):
        self.sources.append(source)
        await self.go.wait()
        if self.failures:
            raise self.failures.pop(0)
        if self.tokenizer is None:
            raise EngineSpecError(f"tokenizer {source!r} is nowhere")
        return self.tokenizer


class Tokenising(FakeAdapter):
    """An engine with that tokenizer."""

    tokenizer: ChatTokenizer
    asked = 0
    failures_left = 0

    async def tokenize(self, path, body):
        self.asked += 1
        if self.failures_left:
            self.failures_left -= 1
            raise EngineUnavailable("busy")
        if path == COMPLETIONS:
            return self.tokenizer.encode(body.get("prompt"), add_special_tokens=True)
        return self.tokenizer.chat(body.get("messages"), tools=body.get("tools")).token_ids


class World:
    def __init__(self, tokenizer, loader):
        self.tokenizer, self.loader = tokenizer, loader
        self.tasks, self.fleet = Supervisor(), Fleet()
        self.tokenisation = PoolTokenizers(self.tasks, PromptTables(), loader)

    def join(self, engine_id, info=ASKABLE):
        adapter = Tokenising(engine_id, info=info)
        adapter.tokenizer = self.tokenizer
        engine = self.fleet.add(adapter)
        self.rejoin(engine)
        return engine

    def rejoin(self, engine):
        pool = self.fleet.join(engine, engine.adapter.info)
        engine.state = EngineState.READY
        self.tokenisation.join(engine, engine.adapter.info, pool)

    @property
    def prompts(self):
        return self.fleet.pools["m"].prompts

    async def settled(self):
        async with asyncio.timeout(5):
            while self.tasks._tasks:  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.001)


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir):
    return ChatTokenizer.load(str(tokenizer_dir))


@pytest.fixture
async def world(tokenizer):
    world = World(tokenizer, Loader(tokenizer))
    yield world
    await world.tasks.stop()


async def test_four_engines_load_one_tokenizer(world):
    engines = [world.join(name) for name in "abcd"]
    world.loader.go.set()
    await world.settled()
    assert world.loader.sources == ["acme/model"]
    assert world.prompts.exactness.source == "local"
    assert len([engine for engine in engines if engine.adapter.asked]) == 1


async def test_until_it_is_loaded_the_engines_tokenise(world, tokenizer):
    engine = world.join("a")
    prompt = await world.prompts.build(COMPLETIONS, BODY, salt=None)
    assert (prompt.source, prompt.token_ids) == ("engine", tokenizer.encode("hello", add_special_tokens=True))
    await asyncio.sleep(0)
    assert world.prompts.exactness.source == "engine"
    assert "'acme/model' is being loaded" in world.prompts.exactness.detail
    world.loader.go.set()
    await world.settled()
    asked = engine.adapter.asked
    assert (await world.prompts.build(COMPLETIONS, BODY, salt=None)).source == "local"
    assert engine.adapter.asked == asked


async def test_a_restarted_engine_finds_the_tokenizer_and_its_check(world):
    engine = world.join("a")
    world.loader.go.set()
    await world.settled()
    prompts, asked = world.prompts, engine.adapter.asked
    world.fleet.leave(engine)
    world.rejoin(engine)
    await world.settled()
    assert world.prompts is prompts
    assert (world.loader.sources, engine.adapter.asked) == (["acme/model"], asked)


async def test_a_pool_whose_engines_were_all_removed_gets_its_tokenizer_again(world):
    world.join("a")
    world.loader.go.set()
    await world.settled()
    world.fleet.remove(world.fleet.engine("a"))
    world.join("a")
    await world.settled()
    assert world.prompts.exactness.source == "local"


async def test_one_that_cannot_be_loaded_is_looked_for_once_and_the_log_says_what_happens(tokenizer):
    world = World(tokenizer, Loader())
    world.loader.go.set()
    with structlog.testing.capture_logs() as logs:
        engine = world.join("a")
        await world.settled()
        world.fleet.leave(engine)
        world.rejoin(engine)
        world.join("b")
        await world.settled()
    assert world.loader.sources == ["acme/model"]
    (line,) = logs
    assert line["event"] == "the engines tokenise"
    assert "tokenizer 'acme/model' is nowhere" in line["detail"]


async def test_one_whose_source_is_away_is_looked_for_again(world, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenisation, "RELOAD_S", 0.001)
    world.loader.go.set()
    world.loader.failures = [EngineUnavailable("the hub is away"), EngineUnavailable("still away")]
    with structlog.testing.capture_logs() as logs:
        world.join("a")
        await world.settled()
    assert world.loader.sources == ["acme/model"] * 3
    assert world.prompts.exactness.source == "local"
    assert [line["event"] for line in logs] == ["the engines tokenise", "tokenizer gives the engine's ids"]


async def test_an_engine_that_fell_asleep_after_its_last_health_check_is_not_woken(world, monkeypatch):
    monkeypatch.setattr(tokenisation, "RETRY_S", 0.01)
    is_awake, asked_whether = False, 0

    async def is_loaded(_adapter):
        nonlocal asked_whether
        asked_whether += 1
        return is_awake

    monkeypatch.setattr(Tokenising, "is_loaded", is_loaded)
    engine = world.join("a")
    world.loader.go.set()
    async with asyncio.timeout(5):
        while asked_whether < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert engine.adapter.asked == 0
    detail = world.prompts.exactness.detail
    assert detail == (
        "the engine tokenises each prompt: the tokenizer 'acme/model' is loaded; it is checked once the "
        "engine has the model in memory"
    )
    is_awake = True  # a request has woken it
    await world.settled()
    assert (engine.adapter.asked > 0, world.prompts.exactness.source) == (True, "local")


async def test_any_engine_of_the_pool_whose_model_is_in_memory_is_asked(world, monkeypatch):
    """Of two routers, requests may load the model always on the second one."""
    monkeypatch.setattr(tokenisation, "RETRY_S", 0.01)

    async def is_loaded(adapter):
        return adapter.spec.id == "b"

    monkeypatch.setattr(Tokenising, "is_loaded", is_loaded)
    first, second = world.join("a"), world.join("b")
    world.loader.go.set()
    await world.settled()
    assert (first.adapter.asked, second.adapter.asked > 0) == (0, True)
    assert world.prompts.exactness.source == "local"


async def test_a_check_that_its_model_leaves_is_done_again_from_the_start(world, monkeypatch):
    monkeypatch.setattr(tokenisation, "RETRY_S", 0.01)
    leaves = [False] * 6 + [True]  # after the plain chats

    async def tokenize_if_loaded(adapter, path, body):
        if leaves and leaves.pop(0):
            raise ModelNotLoaded("unloaded")
        return await adapter.tokenize(path, body)

    monkeypatch.setattr(Tokenising, "tokenize_if_loaded", tokenize_if_loaded)
    world.join("a")
    world.loader.go.set()
    await world.settled()
    assert leaves == []
    assert world.prompts.forms.rows[Form.TEXT_PARTS].source == "local"


async def test_where_the_first_engines_tokenizer_is_nowhere_that_of_another_is_loaded(world, tokenizer):
    world.loader.tokenizer = None
    world.loader.go.set()
    world.join("a")
    await world.settled()
    world.loader.tokenizer = tokenizer
    world.join("b", replace(ASKABLE, tokenizer="/models/b"))
    await world.settled()
    assert world.loader.sources == ["acme/model", "/models/b"]
    assert world.prompts.exactness.source == "local"


async def test_an_engine_that_does_not_answer_is_asked_again(world, monkeypatch):
    monkeypatch.setattr("proxy.fleet.tokenisation.RETRY_S", 0.0)
    engine = world.join("a")
    engine.adapter.failures_left = 2
    world.loader.go.set()
    await world.settled()
    assert world.prompts.exactness.ok
    assert world.prompts.exactness.source == "local"


@pytest.mark.parametrize(
    ("info", "alter", "event", "level"),
    [
        (ASKABLE, False, "tokenizer gives the engine's ids", "info"),
        (ASKABLE, True, "the engines tokenise", "warning"),
        (replace(ASKABLE, tokenizer=None), False, "the engines tokenise", "info"),
        (replace(INFO, tokenizer="acme/model"), False, "tokenizer is not checked", "warning"),
        (INFO, False, "prompts are not followed", "warning"),
    ],
)
async def test_the_log_says_what_came_of_it(world, monkeypatch, info, alter, event, level):
    if alter:
        monkeypatch.setattr(Tokenising, "tokenize", one_token)
    world.loader.go.set()
    with structlog.testing.capture_logs() as logs:
        world.join("a", info)
        await world.settled()
    assert [(line["event"], line["log_level"]) for line in logs] == [(event, level)]


async def one_token(_self, _path, _body):
    return array("i", [6])


async def test_a_pool_without_ready_engines_is_not_checked_and_one_that_is_gone_not_waited_for(
    world, monkeypatch
):
    monkeypatch.setattr("proxy.fleet.tokenisation.RETRY_S", 0.0)
    engine = world.join("a")
    engine.state = EngineState.DOWN
    world.loader.go.set()
    await asyncio.sleep(0.01)
    assert world.tasks._tasks
    assert engine.adapter.asked == 0
    world.fleet.remove(world.fleet.engine("a"))
    await world.settled()
