"""What is said of a slot is compared with the tokens in a file the real server saves from it."""

from __future__ import annotations

from array import array
from random import Random

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from engine_adapter.llama_server.answer import (
    CompletionOutput,
    _Timings,
    _Usage,
    known_tokens,
    read_answer,
    slot_content,
)
from engine_adapter.llama_server.saved_files import read_tokens
from tests.engine_adapter.llama_server.answers import DONE, delta, event
from tests.engines import served

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SLOT = 1
WORDS = ["hello", " world", "é", "🙂", "漢字", "\n\n", " x", "<|im_end|>", "12345", "Привет ", "{"]
# What a grammar forces is sampled token by token in ways no text would be tokenised to.
GRAMMARS = [
    "root ::= [a-z ]{1,40}",
    "root ::= [ab]{3} [é🙂漢]{3} [c]",
    "root ::= [é]{1,20}",
    'root ::= ("é" | "a" | " the" | "🙂🚀" | "Привет"){1,12}',
]


async def post(llama, path, fields):
    """An answer over a connection of its own: the server closes it after a stream, and does not say so."""
    async with httpx.AsyncClient(base_url=llama.url, timeout=60, trust_env=False) as client:
        return (await client.post(path, json=fields)).raise_for_status().content


async def content_after(control, llama, path, fields):
    """What is known of a slot, compared with what is in it: (known, unknown, prompt, answer)."""
    text = fields.get("prompt")
    if text is None:
        messages = fields.get("messages") or [{"role": "user", "content": fields["input"]}]
        text = (await control.call("POST", "/apply-template", json={"messages": messages}))["prompt"]
    tokenize = {"content": text, "add_special": True, "parse_special": True}
    prompt = array("i", (await control.call("POST", "/tokenize", json=tokenize))["tokens"])
    answer = read_answer(await post(llama, path, {"stream": True, "id_slot": SLOT, **fields}))
    assert answer.is_complete
    await control.call("POST", f"/slots/{SLOT}?action=save", json={"filename": "answer.bin"})
    truth = read_tokens(llama.save_dir / "answer.bin")
    known, unknown = slot_content(prompt, answer, await known_tokens(control, answer))
    assert known == truth[: len(known)], fields
    assert len(known) + unknown == len(truth), fields
    assert known[: len(prompt)] == prompt
    return known, unknown, prompt, answer


def random_request(random):
    text = "".join(random.choices(WORDS, k=random.randint(1, 12)))
    path = random.choice([CHAT, COMPLETIONS])
    length = random.randint(1, 40)
    fields = {
        CHAT: {"messages": [{"role": "user", "content": text}], "max_tokens": length},
        COMPLETIONS: {"prompt": text, "max_tokens": length},
    }[path]
    fields |= {"temperature": random.choice([0, 1]), "seed": random.randrange(10**6)}
    fields["stream_options"] = {"include_usage": random.random() < 0.5}
    return path, fields


@pytest.mark.parametrize("seed", range(2))
async def test_all_of_a_plain_answer_is_known_and_of_others_nothing_that_is_not_so(control, llama, seed):
    random = Random(seed)  # noqa: S311 - requests to try
    known_of, sampled = 0, 0
    for _ in range(20):
        path, fields = random_request(random)
        fields |= random.choice([{}, {"return_progress": True}, {"timings_per_token": True}])
        if random.random() < 0.5:
            fields["grammar"] = random.choice(GRAMMARS)
        known, unknown, prompt, _ = await content_after(control, llama, path, fields)
        if "grammar" in fields:
            known_of += len(known) - len(prompt)
            sampled += len(known) + unknown - len(prompt)
        else:
            assert unknown == 0
    assert 0 < known_of < sampled


def tokenizer(*tokens):
    """A server that tokenises anything to these."""

    async def tokenize(_):
        return JSONResponse({"tokens": tokens})

    return Starlette(routes=[Route("/tokenize", tokenize, methods=["POST"])])


def said(*pieces, sampled=None, finish="length", **fields):
    return CompletionOutput(
        list(pieces), finish_reason=finish, usage=_Usage(completion_tokens=sampled), **fields
    )


@pytest.mark.parametrize(
    "answer",
    [
        CompletionOutput(),
        said(sampled=1),
        said("a"),
        said("a", sampled=1, is_plain=False),
        # A token without text, or text held back, is somewhere among them.
        said("a", "b", sampled=3),
        said("a", "b", sampled=4, finish="stop"),
        # A route that does not say why it ended: the end of a turn, or a character of two tokens.
        said("a", "b", sampled=3, finish=None),
    ],
)
async def test_what_has_no_chunk_per_token_is_not_asked_about(control_of, answer):
    assert not answer.has_chunk_per_token
    assert await known_tokens(control_of("http://127.0.0.1:9"), answer) == array("i")


@pytest.mark.parametrize(
    ("answer", "tokens", "count"),
    [
        (said("a", "b", sampled=2), ["a", "b"], 2),
        (said("a", "b", sampled=3, finish="stop"), ["a", "b"], 2),
        # Tokenised otherwise than sampled, from some token on.
        (said("a", "b", "c", sampled=3), ["a", "bc"], 1),
        (said("ab", "c", sampled=2), ["a", "bc"], 0),
        (said("a", "é", sampled=2), ["a", [0xC3], [0xA9]], 1),
        # Bytes that are no text look all the same.
        (said("a", "\ufffd", sampled=2), ["a", "\ufffd"], 1),
    ],
)
async def test_ids_are_known_as_far_as_each_chunk_is_the_next_token(control_of, answer, tokens, count):
    pieces = [{"id": number, "piece": piece} for number, piece in enumerate(tokens, 1)]
    with served(tokenizer(*pieces)) as url:
        known = await known_tokens(control_of(url), answer)
    assert list(known) == list(range(1, count + 1))


def read(*events):
    return read_answer(b"".join(events))


@pytest.mark.parametrize(
    "odd",
    [
        delta(reasoning_content="hm"),
        delta(tool_calls=[{"index": 0, "function": {"name": "f"}}]),
        delta(content=7),
        event(choices=7),
        event(choices=[{"index": 1, "text": "b"}]),
        b"data: {\n\n",
        b"data: [7]\n\n",
        b'data: "\xff"\n\n',
        b"data: " + b"[" * 5000 + b"\n\n",
    ],
)
def test_what_is_not_text_alone_is_not_plain(odd):
    assert read(delta(content="a"), delta(content="b")).is_plain
    answer = read(delta(content="a"), odd, delta(content="b"))
    assert not answer.is_plain
    assert (answer.pieces[0], answer.pieces[-1]) == ("a", "b")


def test_an_error_and_an_end_too_early():
    error = b'data: {"error":{"code":500,"message":"no room","type":"server_error"}}\n\n'
    answer = read(delta(content="a"), error)
    assert (answer.error, answer.is_complete, answer.pieces) == ("no room", False, ["a"])
    assert slot_content(array("i", [1]), answer, array("i")) == (array("i"), 1)

    cut = read_answer((delta(content="a") + delta(content="b"))[:-3])
    assert (cut.pieces, cut.is_complete, cut.sampled_tokens) == (["a"], False, None)
    assert slot_content(array("i", [1, 2]), cut, array("i")) == (array("i", [1, 2]), 0)
    assert slot_content(array("i", [1, 2]), read(), array("i")) == (array("i"), 0)


def test_counts_are_found_where_they_stand():
    timings = {"cache_n": 3, "prompt_n": 2, "prompt_ms": 1, "predicted_n": 4, "predicted_ms": 2.5}
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    answer = read(event(**end, timings=timings), DONE)
    assert (answer.prompt_tokens, answer.cached_tokens, answer.sampled_tokens) == (5, 3, 4)
    assert answer.finish_reason == "stop"
    usage = {"prompt_tokens": 5, "completion_tokens": 0, "prompt_tokens_details": {"cached_tokens": 0}}
    answer = read(event(**end), event(choices=[], usage=usage))
    assert (answer.prompt_tokens, answer.cached_tokens, answer.sampled_tokens) == (5, 0, 0)
    assert answer.is_complete


@pytest.mark.parametrize(
    ("prompt_tokens", "sampled", "content"),
    [
        (2, 2, ([1, 2, 3], 0)),
        (2, 3, ([1, 2, 3, 4], 0)),
        (2, 5, ([1, 2, 3, 4], 2)),
        (2, 1, ([1, 2], 0)),
        (2, 0, ([1, 2], 0)),
        (3, 2, ([], 4)),
    ],
)
def test_slot_content(prompt_tokens, sampled, content):
    answer = CompletionOutput(timings=_Timings(cache_n=1, prompt_n=prompt_tokens - 1, predicted_n=sampled))
    known, unknown = slot_content(array("i", [1, 2]), answer, array("i", [3, 4]))
    assert (list(known), unknown) == content
