from array import array

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from engine_adapter.errors import EngineRejected, EngineUnavailable
from engine_adapter.http.control import ControlClient
from engine_adapter.prompt.forms import BILLING
from engine_adapter.prompt.template_input import ContentFormat
from engine_adapter.types import EngineSpec, MediaSpan
from engine_adapter.vllm.prompts import VLLM_INPUT, render, tokenize
from tests.engine_adapter.builders import body
from tests.engines import served
from tests.fake_engines.text import chat_tokens, encode
from tests.fake_engines.vllm import running_vllm

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi there"}]


@pytest.fixture(scope="module")
def server():
    with running_vllm(loras=("ada",)) as server:
        yield server


@pytest.fixture
async def control(server):
    control = ControlClient(EngineSpec("vllm", server.url, "e"))
    yield control
    await control.aclose()


async def test_chats_and_texts_with_what_shapes_them(control):
    # A chat body may hold a prompt, too: only what belongs to its route counts.
    chat = body(messages=HI, prompt="other", model="alias", add_generation_prompt=False)
    assert (await tokenize(control, CHAT, chat, "tiny")).tolist() == chat_tokens(
        HI, add_generation_prompt=False
    )
    text = body(messages=HI, prompt="some text", model="alias")
    assert (await tokenize(control, TEXT, text, "tiny")).tolist() == encode("some text")
    assert await tokenize(control, TEXT, body(prompt=[1, 2]), "tiny") == array("i", [1, 2])


async def test_reasoning_has_the_name_that_chats_read():
    sent = []

    async def answer(request):
        sent.append(await request.json())
        return JSONResponse({"tokens": [1]})

    said = {"role": "assistant", "content": "So."}
    messages = [
        *HI,
        {**said, "reasoning_content": "Hm."},
        {**said, "reasoning_content": "Hm.", "reasoning": "Ah."},
        {**said, "reasoning_content": None},
    ]
    with served(Starlette(routes=[Route("/tokenize", answer, methods=["POST"])])) as url:
        control = ControlClient(EngineSpec("vllm", url, "e"))
        await tokenize(control, CHAT, body(messages=messages), "tiny")
        await control.aclose()
    assert sent[0]["messages"] == [*HI, {**said, "reasoning": "Hm."}, {**said, "reasoning": "Ah."}, said]


@pytest.mark.parametrize("prompt", [None, ["a", "b"], [[1], [2]], [2**40], [1.5]])
async def test_prompts_that_are_not_one(control, prompt):
    with pytest.raises(EngineRejected, match="prompt must be") as caught:
        await tokenize(control, TEXT, body(prompt=prompt), "tiny")
    assert (caught.value.status, caught.value.param) == (400, "prompt")


@pytest.mark.parametrize(
    "fields",
    [{"documents": []}, {"reasoning_effort": "low"}, {"truncate_prompt_tokens": 5}, {"prompt_embeds": "x"}],
)
async def test_what_tokenize_would_misread_is_refused(control, fields):
    (name,) = fields
    with pytest.raises(EngineRejected, match="--enable-scale-out") as caught:
        await tokenize(control, CHAT, body(messages=HI, **fields), "tiny")
    assert caught.value.param == name
    assert (await render(control, CHAT, body(messages=HI, **fields), "tiny")).token_ids


async def test_routes_whose_prompts_are_not_told(control):
    with pytest.raises(EngineRejected, match="--enable-scale-out"):
        await tokenize(control, "/v1/responses", body(input="Hi"), "tiny")
    with pytest.raises(EngineRejected, match="renders no prompts"):
        await render(control, "/v1/embeddings", body(input="Hi"), "tiny")
    with pytest.raises(EngineRejected, match="empty conversation"):
        await render(control, CHAT, body(messages=[]), "tiny")


RENDERED = {"token_ids": [1, 2, 3]}
SEVERAL = {
    "mm_hashes": {"image": ["b", "c"], "audio": ["a"]},
    "mm_placeholders": {
        "image": [{"offset": 5, "length": 4}, {"offset": 20, "length": 4}],
        "audio": [{"offset": 11, "length": 2}],
    },
}


async def rendered(answer, path=CHAT):
    app = Starlette(routes=[Route(f"{path}/render", lambda _: JSONResponse(answer), methods=["POST"])])
    with served(app) as url:
        control = ControlClient(EngineSpec("vllm", url, "e"))
        try:
            return await render(control, path, body(messages=HI), "tiny")
        finally:
            await control.aclose()


async def test_items_come_in_the_order_of_the_prompt():
    prompt = await rendered(RENDERED | {"features": SEVERAL})
    assert prompt.token_ids == array("i", [1, 2, 3])
    assert prompt.media == (MediaSpan("b", 5, 4), MediaSpan("a", 11, 2), MediaSpan("c", 20, 4))


async def test_several_prompts_are_none():
    assert (await rendered([RENDERED], TEXT)).media == ()
    with pytest.raises(EngineRejected, match="several prompts"):
        await rendered([RENDERED, RENDERED], TEXT)


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"token_ids": ["a"]},
        RENDERED | {"features": {"mm_hashes": {"image": [None]}, "mm_placeholders": {"image": []}}},
        RENDERED | {"features": SEVERAL | {"mm_placeholders": {}}},
    ],
)
async def test_answers_of_another_form(answer):
    with pytest.raises(EngineUnavailable, match="not as expected"):
        await rendered(answer)


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
SAID = {"role": "assistant", "content": "hi"}


def part(text):
    return {"type": "text", "text": text}


@pytest.mark.parametrize(
    ("message", "given"),
    [
        (SAID | {"tool_calls": []}, SAID),
        (SAID | {"tool_calls": None, "refusal": None, "weight": 1, "tool_call_id": "c"}, SAID),
        ({"role": "assistant"}, {"role": "assistant", "content": ""}),
        (SAID | {"reasoning_content": "hm"}, SAID | {"reasoning": "hm", "reasoning_content": "hm"}),
        (
            SAID | {"reasoning_content": "hm", "reasoning": ""},
            SAID | {"reasoning": "", "reasoning_content": ""},
        ),
        (
            {"role": "user", "content": "hi", "reasoning": "hm", "name": "ada"},
            {"role": "user", "content": "hi", "name": "ada"},
        ),
        (
            {"content": "4", "role": "tool", "tool_call_id": "c", "tool_calls": []},
            {"role": "tool", "content": "4", "tool_call_id": "c"},
        ),
        (
            {"role": "system", "content": f"{BILLING}: 1\nBe brief."},
            {"role": "system", "content": "Be brief."},
        ),
        ({"role": "system", "content": f"{BILLING}: 1"}, {"role": "system", "content": ""}),
        ({"role": "user", "content": BILLING}, {"role": "user", "content": BILLING}),
    ],
)
def test_a_message_keeps_what_vllm_knows(message, given):
    assert list(VLLM_INPUT.message(message, ContentFormat.STRING).items()) == list(given.items())


@pytest.mark.parametrize(
    ("message", "content"),
    [
        (SAID, [part("hi")]),
        ({"role": "assistant", "content": None}, []),
        ({"role": "user", "content": [part("a"), part("b")]}, [part("a"), part("b")]),
        ({"role": "system", "content": [part(BILLING), part("a")]}, [part("a")]),
        ({"role": "tool", "content": [part("a"), part("b")]}, "a\nb"),
    ],
)
def test_a_template_that_takes_parts_gets_parts(message, content):
    assert VLLM_INPUT.message(message, ContentFormat.PARTS)["content"] == content


@pytest.mark.parametrize(
    ("call", "given"),
    [
        (CALL, {"id": "c", "function": {"arguments": {"a": 1}, "name": "f"}, "type": "function"}),
        ({"function": {"name": "f", "arguments": [1]}}, {"function": {"arguments": {}, "name": "f"}}),
        (
            {"index": 0, **CALL, "function": {"name": "f"}},
            {"id": "c", "function": {"arguments": {}, "name": "f"}, "index": 0, "type": "function"},
        ),
    ],
)
def test_a_call_has_vllms_order(call, given):
    (seen,) = VLLM_INPUT.message(SAID | {"tool_calls": [call]}, ContentFormat.STRING)["tool_calls"]
    assert str(seen) == str(given)
