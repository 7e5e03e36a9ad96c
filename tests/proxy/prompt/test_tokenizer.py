import asyncio
import threading

import msgspec
import pytest

from engine_adapter import JsonBody
from engine_adapter.prompt.chat import ChatTokenizer
from proxy.prompt.render import read_prompt
from proxy.prompt.tokenizer import EngineTokenizer, LocalTokenizer
from tests.proxy.prompt.conftest import TokenizingEngine

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def request(path, **fields):
    body = JsonBody(msgspec.json.encode(fields))
    return read_prompt(path, body), body


@pytest.fixture
def watched(tokenizer_dir):
    """A local tokenizer, and the threads it was used from."""
    threads = []

    class Watched(ChatTokenizer):
        def encode(self, text, *, add_special_tokens):
            threads.append(threading.current_thread())
            return super().encode(text, add_special_tokens=add_special_tokens)

    return LocalTokenizer(Watched.load(str(tokenizer_dir)), vocab_size=None, hidden_size=None), threads


@pytest.mark.parametrize(("size", "inline"), [(10, True), (1_000_000, False)])
async def test_long_work_leaves_the_event_loop(watched, size, inline):
    local, threads = watched
    threads.clear()  # the search for a cut encodes, too
    source, body = request(CHAT, messages=[{"role": "user", "content": "a" * size}])
    chat = await local.chat(source, body)
    assert chat.token_ids == local.tokenizer.chat(source.messages).token_ids
    source, body = request(COMPLETIONS, prompt="a" * size)
    await local.text(source)
    here = threading.current_thread()
    assert [thread is here for thread in threads] == [inline, True, inline]


async def test_engines_are_asked_until_one_answers(engine):
    gone, refusing = (TokenizingEngine(engine.tokenizer) for _ in range(2))
    gone.is_gone()
    refusing.refuses()
    _, body = request(COMPLETIONS, prompt="hello")
    text = await EngineTokenizer().ask([gone, engine, refusing], COMPLETIONS, body)
    assert text is not None
    assert await EngineTokenizer().ask([refusing, engine], COMPLETIONS, body) is None
    assert await EngineTokenizer().ask((), COMPLETIONS, body) is None
    assert [len(each.asked) for each in (gone, engine, refusing)] == [1, 1, 1]


async def test_an_engine_that_does_not_answer_in_time_leaves_the_prompt_unknown(engine, monkeypatch):
    async def hang(*_):
        await asyncio.sleep(60)

    monkeypatch.setattr("proxy.prompt.tokenizer.ANSWER_S", 0.01)
    engine.tokenize = engine.render = hang
    _, body = request(COMPLETIONS, prompt="hello")
    assert await EngineTokenizer().ask([engine], COMPLETIONS, body) is None
    assert await EngineTokenizer().render([engine], CHAT, body) is None
