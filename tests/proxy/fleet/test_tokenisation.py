import asyncio
from array import array
from dataclasses import replace

import pytest
import structlog

from engine_adapter import (
    Capability,
    ChatError,
    EngineRejected,
    EngineSpecError,
    EngineUnavailable,
    JsonBody,
    ModelNotLoaded,
)
from engine_adapter.prompt.chat import ChatPrompt, ChatTokenizer
from engine_adapter.prompt.forms import Form
from engine_adapter.prompt.template_trials import MessageShape
from proxy.fleet import tokenisation
from proxy.fleet.engine import EngineState
from proxy.fleet.fleet import Fleet
from proxy.fleet.tokenisation import Renderings, of_tokens
from proxy.prompt import RegisteredTables, audit_tokens
from proxy.prompt.known_chats import TextAround
from proxy.runtime import Supervisor
from tests.fakes import INFO, FakeAdapter
from tests.kv_world import until

COMPLETIONS = "/v1/completions"
ASKABLE = replace(INFO, tokenizer="acme/model", capabilities=frozenset({Capability.TOKENIZE}))
CHAT = "/v1/chat/completions"
ASK = JsonBody(b'{"messages": [{"role": "user", "content": "hello"}]}')


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
    extra = ""  # begins each prompt
    asked = 0
    failures_left = 0

    async def tokenize(self, path, body):
        self.asked += 1
        if self.failures_left:
            self.failures_left -= 1
            raise EngineUnavailable("busy")
        if path == COMPLETIONS:
            return self.tokenizer.encode(body.get("prompt"), add_special_tokens=True)
        extra = self.tokenizer.encode(self.extra, add_special_tokens=False)
        try:
            return extra + self.tokenizer.chat(body.get("messages"), tools=body.get("tools")).token_ids
        except ChatError as error:
            raise EngineRejected(str(error), status=400) from error


class World:
    def __init__(self, tokenizer, loader):
        self.tokenizer, self.loader = tokenizer, loader
        self.tasks, self.fleet = Supervisor(), Fleet()
        self.renderings = Renderings(self.tasks, RegisteredTables(), loader)

    def join(self, engine_id, info=ASKABLE, extra=""):
        adapter = Tokenising(engine_id, info=info)
        adapter.tokenizer, adapter.extra = self.tokenizer, extra
        engine = self.fleet.add(adapter)
        self.rejoin(engine)
        return engine

    def rejoin(self, engine):
        pool = self.fleet.join(engine, engine.adapter.info)
        engine.state = EngineState.READY
        self.renderings.join(engine, engine.adapter.info, pool)

    @property
    def prompts(self):
        return self.fleet.pools["m"].prompts

    async def load(self):
        """Lets tokenizers load, and waits until all is checked."""
        self.loader.go.set()
        await self.settled()

    async def settled(self):
        await until(lambda: not self.tasks._tasks, 5)


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir):
    return ChatTokenizer.load(str(tokenizer_dir))


@pytest.fixture
async def world(tokenizer):
    world = World(tokenizer, Loader(tokenizer))
    yield world
    await world.tasks.stop()


async def test_a_restarted_engine_finds_the_tokenizer_and_is_compared_again(world):
    engine = world.join("a")
    await world.load()
    prompts, asked = world.prompts, engine.adapter.asked
    world.fleet.leave(engine)
    world.rejoin(engine)
    assert not engine.is_proven
    await world.settled()
    assert (engine.is_proven, world.prompts.local) == (True, prompts.local)
    assert (world.loader.sources, engine.adapter.asked > asked) == (["acme/model"], True)
    world.fleet.remove(engine)  # the pool with it
    world.join("a")
    await world.settled()
    assert world.prompts.exactness.source == "local"


async def test_after_a_restart_what_the_engine_rendered_before_is_rendered_again(world):
    engine = world.join("a")
    await world.load()
    known, around = world.prompts._known_media, TextAround(array("i", [5, 1, 2]), 0, 2)
    known.learn(b"key", around, ChatPrompt(array("i", [9, 9, 1, 2]), array("Q", [7, 0, 0, 0])))
    assert known.find(b"key", around) is not None
    world.fleet.leave(engine)
    world.rejoin(engine)
    assert world.prompts._known_media.find(b"key", around) is None


async def test_a_restarted_engine_that_makes_other_tokens_gets_another_builder_and_the_log_says_so(world):
    engine = world.join("a")
    await world.load()
    before = engine.prompts
    world.fleet.leave(engine)
    engine.adapter.extra = "<other>"
    with structlog.testing.capture_logs() as logs:
        world.rejoin(engine)
        await world.settled()
    assert engine.prompts is not before
    assert engine.prompts.forms.rows[Form.PLAIN].source == "engine"
    (line,) = [line for line in logs if line["event"] == "engine has changed"]
    assert (line["engine"], "plain" in line["changed"][0]) == ("a", True)


async def test_two_engines_that_make_different_tokens_get_their_own(world):
    """As two vLLMs of a rolling update, one with other default arguments of its template."""
    first = world.join("a")
    await world.load()
    with structlog.testing.capture_logs() as logs:
        second = world.join("b", extra="<other>")
        await world.settled()
    assert (first.is_proven, second.is_proven) == (True, True)
    assert world.fleet.pools["m"].renderings == (first.prompts, second.prompts)
    assert (await first.prompts.build(CHAT, ASK, salt=None)).source == "local"
    prompt = await second.prompts.build(CHAT, ASK, salt=None)
    assert (prompt.source, prompt.token_ids) == ("engine", await second.adapter.tokenize(CHAT, ASK))
    (line,) = [line for line in logs if line["event"].startswith("engines of one model make different")]
    assert line["engines"] == ["a", "b"]


async def test_an_engine_that_cuts_prompts_since_its_restart_gets_another_builder(world):
    info = replace(ASKABLE, max_model_len=4)
    first, second = world.join("a", info), world.join("b", info)
    await world.load()
    for engine in (first, second):
        world.fleet.leave(engine)
        engine.adapter.info = replace(info, cuts_prompts=True)
        world.rejoin(engine)
        await world.settled()
        assert await engine.prompts.build(CHAT, ASK, salt=None) is None
        if engine is first:
            (finding,) = of_tokens(engine, world.fleet.pools["m"])
            assert "it differs from b, of the same model, in whether it cuts long prompts" in finding.problem
    assert first.prompts is second.prompts


async def test_an_engine_with_other_files_loads_them(world, tmp_path, tokenizer):
    """As a llama-server that comes back with another GGUF under its path."""
    file = tmp_path / "model.gguf"
    file.write_bytes(b"1")
    engine = world.join("a", replace(ASKABLE, tokenizer=str(file)))
    await world.load()
    file.write_bytes(b"22")
    world.fleet.leave(engine)
    world.rejoin(engine)
    await world.settled()
    assert world.loader.sources == [str(file)] * 2


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
    await until(lambda: asked_whether >= 3, 5)
    assert engine.adapter.asked == 0
    assert "it is checked once the engine has the model in memory" in world.prompts.exactness.detail
    is_awake = True  # a request has woken it
    await world.settled()
    assert (engine.adapter.asked > 0, world.prompts.exactness.source) == (True, "local")


async def test_a_check_that_its_model_leaves_is_done_again_from_the_start(world, monkeypatch):
    monkeypatch.setattr(tokenisation, "RETRY_S", 0.01)
    leaves = [False] * 6 + [True]  # after the plain chats

    async def tokenize_if_loaded(adapter, path, body):
        if leaves and leaves.pop(0):
            raise ModelNotLoaded("unloaded")
        return await adapter.tokenize(path, body)

    monkeypatch.setattr(Tokenising, "tokenize_if_loaded", tokenize_if_loaded)
    world.join("a")
    await world.load()
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
    monkeypatch.setattr(tokenisation, "RETRY_S", 0.0)
    engine = world.join("a")
    engine.adapter.failures_left = 2
    await world.load()
    assert (world.prompts.exactness.ok, world.prompts.exactness.source) == (True, "local")


async def test_a_difference_takes_a_form_from_that_engine_alone_and_it_comes_back(world):
    first, second = world.join("a"), world.join("b")
    await world.load()
    shared, pool = first.prompts, world.fleet.pools["m"]
    prompt = await shared.build(CHAT, ASK, salt=None)
    pool.part(second)
    assert audit_tokens(second.prompts, prompt, prompt.token_ids[1:])
    assert (await first.prompts.build(CHAT, ASK, salt=None)).source == "local"
    assert (await second.prompts.build(CHAT, ASK, salt=None)).source == "engine"
    with structlog.testing.capture_logs() as logs:
        world.renderings.prove_again(second, pool)
        assert not second.is_proven
        await world.settled()
    assert (first.prompts, second.prompts, second.is_proven) == (shared, shared, True)
    assert [line["event"] for line in logs] == ["tokens of these forms are made here again"]


async def test_what_a_template_loses_is_known_before_the_tokenizer_is_loaded(world, monkeypatch):
    async def tokenize(_adapter, _path, body):
        messages = body.view("messages")
        if [each["role"] for each in messages] == ["user", "user"]:
            raise EngineRejected("roles must alternate", status=400)
        return array("i", map(ord, str(messages)))

    monkeypatch.setattr(Tokenising, "tokenize", tokenize)
    world.join("a")  # its tokenizer is not loaded before `go`
    await until(lambda: world.fleet.pools["m"].lost_shapes, 5)
    assert world.fleet.pools["m"].lost_shapes == {MessageShape.TURNS}
    assert world.loader.sources == ["acme/model"]
    assert not world.prompts.is_proven
    await world.load()
    assert world.fleet.pools["m"].lost_shapes == {MessageShape.TURNS}


async def test_what_a_template_loses_counts_while_one_of_its_engines_is_there(world):
    engine = world.join("a")
    await world.load()
    engine.prompts.forms.lost_shapes = frozenset({MessageShape.TURNS})
    pool = world.fleet.pools["m"]
    pool.render(engine, engine.prompts, is_proven=True)
    assert pool.lost_shapes == {MessageShape.TURNS}
    pool.leave(engine)
    assert pool.lost_shapes == frozenset()
