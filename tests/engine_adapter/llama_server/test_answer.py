"""What is said of a slot is compared with the tokens in a file the real server saves from it."""

from __future__ import annotations

from array import array
from random import Random

import gguf
import httpx
import msgspec
import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from engine_adapter.errors import EngineUnavailable
from engine_adapter.llama_server.answer import (
    Answer,
    generated_tokens,
    known_tokens,
    read_answer,
    slot_content,
    stream_payloads,
)
from engine_adapter.llama_server.state_file import read_tokens
from tests.engines import served

CHAT, COMPLETIONS, RESPONSES, NATIVE = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/completion",
)
SLOT = 1
WORDS = ["hello", " world", "é", "🙂", "漢字", "\n\n", " x", "<|im_end|>", "12345", "Привет ", "{"]
STOPS = [" the", "e", "ing", "\n", " re", "é", "st", " c", "🙂"]
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


async def slot_after(control, llama, path, fields):
    """The prompt, the answer, and all tokens that were in the slot after it."""
    prompt = fields.get("prompt")
    if prompt is None:
        messages = fields.get("messages") or [{"role": "user", "content": fields["input"]}]
        prompt = (await control.call("POST", "/apply-template", json={"messages": messages}))["prompt"]
    tokenize = {"content": prompt, "add_special": True, "parse_special": True}
    ids = array("i", (await control.call("POST", "/tokenize", json=tokenize))["tokens"])
    request = {"stream": True, "id_slot": SLOT, **fields}
    answer = read_answer(await post(llama, path, request), streamed=True)
    await control.call("POST", f"/slots/{SLOT}?action=save", json={"filename": "answer.bin"})
    return ids, answer, read_tokens(llama.save_dir / "answer.bin")


async def content_after(control, llama, path, fields):
    """What is known of the slot, checked against what is in it: (known, unknown, prompt, answer)."""
    prompt, answer, truth = await slot_after(control, llama, path, fields)
    assert answer.is_complete
    generated = await generated_tokens(control, answer, has_stop="stop" in fields)
    known, unknown = slot_content(prompt, answer, generated)
    assert known == truth[: len(known)], fields
    assert len(known) + unknown == len(truth), fields
    assert known[: len(prompt)] == prompt
    return known, unknown, prompt, answer


def random_request(random):
    text = "".join(random.choices(WORDS, k=random.randint(1, 12)))
    path = random.choice([CHAT, COMPLETIONS, RESPONSES, NATIVE])
    length = random.randint(1, 40)
    fields = {
        CHAT: {"messages": [{"role": "user", "content": text}], "max_tokens": length},
        COMPLETIONS: {"prompt": text, "max_tokens": length},
        RESPONSES: {"input": text, "max_output_tokens": length},
        NATIVE: {"prompt": text, "n_predict": length},
    }[path]
    fields |= {"temperature": random.choice([0, 1]), "seed": random.randrange(10**6)}
    fields["stream_options"] = {"include_usage": random.random() < 0.5}
    return path, fields


@pytest.mark.parametrize("seed", range(2))
async def test_all_of_a_plain_answer_is_known(control, llama, seed):
    random = Random(seed)  # noqa: S311 - requests to try
    for _ in range(20):
        path, fields = random_request(random)
        extra = random.choice([{}, {"return_progress": True}, {"timings_per_token": True}])
        _, unknown, _, answer = await content_after(control, llama, path, fields | extra)
        assert unknown == 0
        assert answer.prompt_ms is not None
        assert answer.predicted_ms is not None


@pytest.mark.parametrize("seed", range(2))
async def test_nothing_is_claimed_that_is_not_so(control, llama, seed):
    random = Random(seed)  # noqa: S311 - requests to try
    known_of, sampled = 0, 0
    for _ in range(30):
        path, fields = random_request(random)
        if random.random() < 0.5:
            fields["stop"] = random.sample(STOPS, 2)
        if random.random() < 0.6:
            fields["grammar"] = random.choice(GRAMMARS)
        known, unknown, prompt, _ = await content_after(control, llama, path, fields)
        known_of += len(known) - len(prompt)
        sampled += len(known) + unknown - len(prompt)
    assert 0 < known_of < sampled


async def test_characters_of_several_tokens_are_known_when_they_are_as_the_server_would_have_them(
    control, llama
):
    fields = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 40, "temperature": 0}
    text = "🙂 x 漢字"
    tokenised = await control.call("POST", "/tokenize", json={"content": text})
    # The bias leads along the one tokenisation that /tokenize knows.
    bias = {"logit_bias": [[token, 80] for token in tokenised["tokens"]]}
    known, unknown, prompt, answer = await content_after(
        control, llama, CHAT, {**fields, **bias, "grammar": f'root ::= "{text}"'}
    )
    assert "".join(answer.pieces) == text
    assert len(answer.pieces) < len(tokenised["tokens"])
    assert (unknown, list(known[len(prompt) :])) == (0, tokenised["tokens"])


async def test_white_space_that_a_server_trims_makes_the_first_token_uncertain(control, llama):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    fields = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "temperature": 0}
    _, plain, _ = await slot_after(control, llama, CHAT, fields)
    assert plain.pieces[0].startswith(" ")
    assert len(await generated_tokens(control, plain, has_stop=False, may_trim=True)) == 4
    _, trimmed, _ = await slot_after(control, llama, CHAT, {**fields, "tools": tools})
    assert not trimmed.pieces[0].startswith(" ")
    assert await generated_tokens(control, trimmed, has_stop=False, may_trim=True) == array("i")
    # On a route that shows all text nothing is trimmed.
    _, native, _ = await slot_after(control, llama, NATIVE, {"prompt": "a", "n_predict": 4, "temperature": 0})
    assert len(await generated_tokens(control, native, has_stop=False, may_trim=True)) == 4


async def test_an_answer_of_several_choices_says_nothing_of_the_slot(control, llama):
    fields = {
        "prompt": "a",
        "n": 2,
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = read_answer(await post(llama, COMPLETIONS, fields), streamed=True)
    assert (answer.choices, answer.prompt_tokens, answer.predicted_tokens) == (2, 1, 3)
    assert not answer.is_plain
    assert await generated_tokens(control, answer, has_stop=False) == array("i")
    assert slot_content(array("i", [1]), answer, array("i")) == (array("i"), 3)


async def test_an_answer_that_is_no_stream_has_counts(control):
    for path, fields in {
        CHAT: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3},
        COMPLETIONS: {"prompt": "a", "max_tokens": 3},
        RESPONSES: {"input": "a", "max_output_tokens": 3},
        NATIVE: {"prompt": "a", "n_predict": 3},
    }.items():
        raw = await control.fetch("POST", path, msgspec.json.encode({**fields, "cache_prompt": False}))
        answer = read_answer(raw, streamed=False)
        assert (answer.cached_tokens, answer.predicted_tokens, answer.pieces) == (0, 3, ())
        assert answer.prompt_tokens is not None
        assert answer.is_complete
        assert not answer.is_plain


def spm_model(path):
    """A model whose vocabulary puts a space before every text, as Llama 2's does. Its weights are zero."""
    words = ["▁", "a", "b", "▁a", "▁b", "▁ab", "ab", "▁ba", "ba"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    kinds = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2, *[gguf.TokenType.BYTE] * 256]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_block_count(1)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(32)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + [float(len(word)) for word in words])
    writer.add_token_types([*kinds, *[gguf.TokenType.NORMAL] * len(words)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    square = np.zeros((32, 32), np.float16)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", square)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(32, np.float32))
    for name in ("token_embd", "output"):
        writer.add_tensor(f"{name}.weight", np.ones((len(tokens), 32), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


async def test_a_vocabulary_that_puts_a_space_before_a_text(start_llama, control_of, save_dir, tmp_path):
    llama = start_llama(model=spm_model(tmp_path / "spm.gguf"), save_dir=save_dir, ctx=256)
    control = control_of(llama.url)
    for grammar in ('" ab ba ab a b ab"', '"ab ba ab"', '" ab\\n ba é"'):
        fields = {"prompt": "a", "max_tokens": 20, "grammar": f"root ::= {grammar}", "temperature": 0}
        for bias in ("▁ab", "▁ba"):
            await content_after(control, llama, COMPLETIONS, {**fields, "logit_bias": [[bias, 50]]})
    words = (await control.call("POST", "/tokenize", json={"content": "\n ab ba ab"}))["tokens"][2:]
    fields["logit_bias"] = [[token, 50] for token in words]
    fields["grammar"] = 'root ::= " ab ba ab"'
    known, unknown, prompt, _ = await content_after(control, llama, COMPLETIONS, fields)
    assert (unknown, list(known[len(prompt) :])) == (0, words)


def tokenizer(*answers):
    """A server that tokenises anything to these answers, one after the other."""
    left = iter(answers)

    async def tokenize(_):
        return JSONResponse({"tokens": next(left)})

    return Starlette(routes=[Route("/tokenize", tokenize, methods=["POST"])])


async def test_a_server_that_tells_no_pieces_is_an_error(control_of):
    with served(tokenizer([1, 2])) as url, pytest.raises(EngineUnavailable, match="no tokens with pieces"):
        await generated_tokens(control_of(url), plain("a", "b", predicted=2), has_stop=False)


async def test_a_text_that_no_token_begins_with_is_not_known(control_of):
    spaced = [{"id": 1, "piece": " a"}, {"id": 2, "piece": [98]}]
    merged = [{"id": 3, "piece": " "}, {"id": 4, "piece": "\na"}, {"id": 2, "piece": "b"}]
    with served(tokenizer(spaced, merged)) as url:
        answer = plain("a", "b", predicted=2)
        assert await generated_tokens(control_of(url), answer, has_stop=False) == array("i")


async def test_what_has_no_certain_text_is_not_asked_about(control_of):
    nowhere = control_of("http://127.0.0.1:9")
    for answer in (
        Answer(),
        plain(predicted=1),
        plain("", predicted=1),
        plain("a"),
        Answer(pieces=("a",), predicted_tokens=1),
    ):
        assert await generated_tokens(nowhere, answer, has_stop=False) == array("i")


def plain(*pieces, predicted=None, finish="length", **fields):
    return Answer(pieces=pieces, predicted_tokens=predicted, finish_reason=finish, is_plain=True, **fields)


def of(*pieces):
    """Tokens 1, 2, 3 … of these bytes."""
    return [
        (number, piece.encode() if isinstance(piece, str) else piece)
        for number, piece in enumerate(pieces, 1)
    ]


@pytest.mark.parametrize(
    ("answer", "tokenised", "count"),
    [
        (plain("a", "b", predicted=2), of("a", "b"), 2),
        (plain("a", "b", predicted=3, finish="stop"), of("a", "b"), 2),
        (plain("a", "b", "", predicted=3, finish="stop", counts_silent=True), of("a", "b"), 2),
        # Tokenised otherwise than sampled, from some token on.
        (plain("a", "b", "c", predicted=3), of("a", "bc"), 1),
        (plain("ab", "c", predicted=2), of("a", "bc"), 0),
        # A token without text, or text held back, is somewhere among them.
        (plain("a", "b", predicted=3), of("a", "b"), 0),
        (plain("a", "b", predicted=4, finish="stop"), of("a", "b"), 0),
        (plain("a", "", "b", predicted=3, counts_silent=True), of("a", "b"), 1),
        # A character of two tokens, and one that could be of two.
        (plain("a", "é", predicted=3), of("a", b"\xc3", b"\xa9"), 3),
        (plain("a", "é", predicted=3), of("a", "é"), 0),
        (plain("a", "éb", predicted=3), of("a", b"\xc3", b"\xa9b"), 3),
        (plain("a", "bc", predicted=3), of("a", "b", "c"), 0),
        (plain("a", "é", predicted=3), of(b"a\xc3", b"\xa9", ""), 0),
        # Bytes that are no text look all the same.
        (plain("a", "\ufffd", predicted=2), of("a", "\ufffd"), 1),
        (plain("\ufffd", "a", predicted=4), of(b"\xef", b"\xbf", b"\xbd", "a"), 0),
        # A route without a finish_reason: an end of turn, or a character of two tokens.
        (plain("a", "é", "b", predicted=4, finish=None), of("a", "é", "b"), 1),
        (plain("a", "b", predicted=3, finish=None), of("a", "b"), 2),
        (plain("a", "b", predicted=4, finish=None), of("a", "b"), 0),
        (plain("a"), of("a"), 0),
        (Answer(pieces=("a",), predicted_tokens=1), of("a"), 0),
    ],
)
def test_ids_are_known_as_far_as_the_counts_prove_them(answer, tokenised, count):
    known = known_tokens(answer, tokenised, has_stop=False)
    assert list(known) == list(range(1, count + 1))


@pytest.mark.parametrize(
    ("answer", "tokenised", "count"),
    [
        (plain("a", "b", predicted=2, finish="stop"), of("a", "b"), 2),
        (plain("a", "b", predicted=3, finish="stop"), of("a", "b"), 0),
        (plain("a", "b", predicted=3, finish=None), of("a", "b"), 0),
        (plain("a", "bc", predicted=3), of("a", "b", "c"), 3),
        (plain("a", "bc", predicted=4, finish="stop"), of("a", "b", "c"), 0),
    ],
)
def test_with_stop_strings_less_is_certain(answer, tokenised, count):
    known = known_tokens(answer, tokenised, has_stop=True)
    assert list(known) == list(range(1, count + 1))


def event(**fields):
    return b"data: " + msgspec.json.encode(fields) + b"\n\n"


def delta(**fields):
    return event(choices=[{"index": 0, "delta": fields}])


def read(*events):
    return read_answer(b"".join(events), streamed=True)


@pytest.mark.parametrize(
    "odd",
    [
        delta(reasoning_content="hm"),
        delta(tool_calls=[{"index": 0, "function": {"name": "f"}}]),
        delta(content=7),
        event(choices=7),
        event(choices=[{"index": 1, "text": "b"}]),
        event(type="response.reasoning_text.delta", delta="hm"),
        event(type="response.function_call_arguments.delta", delta="{"),
        event(index=1, content="b", stop_type="limit"),
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
    assert (answer.error, answer.is_complete, answer.pieces) == ("no room", False, ("a",))
    assert slot_content(array("i", [1]), answer, array("i")) == (array("i"), 1)

    cut = read_answer((delta(content="a") + delta(content="b"))[:-3], streamed=True)
    assert (cut.pieces, cut.is_complete, cut.predicted_tokens) == (("a",), False, None)
    assert slot_content(array("i", [1, 2]), cut, array("i")) == (array("i", [1, 2]), 0)
    assert slot_content(array("i", [1, 2]), read(), array("i")) == (array("i"), 0)
    assert not read_answer(error.removeprefix(b"data: "), streamed=False).is_complete


def test_counts_are_found_where_they_stand():
    timings = {"cache_n": 3, "prompt_n": 2, "prompt_ms": 1, "predicted_n": 4, "predicted_ms": 2.5}
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    answer = read(event(**end, timings=timings), b"data: [DONE]\n\n")
    counts = (answer.prompt_tokens, answer.cached_tokens, answer.predicted_tokens)
    assert counts == (5, 3, 4)
    assert (answer.prompt_ms, answer.predicted_ms, answer.finish_reason) == (1.0, 2.5, "stop")
    usage = {"prompt_tokens": 5, "completion_tokens": 0, "prompt_tokens_details": {"cached_tokens": 0}}
    answer = read(event(**end), event(choices=[], usage=usage))
    assert (answer.prompt_tokens, answer.cached_tokens, answer.predicted_tokens) == (5, 0, 0)
    assert answer.is_complete
    # The second choice ends later, and is another slot's.
    other = {"choices": [{"index": 1, "delta": {}, "finish_reason": "stop"}]}
    late = usage | {"completion_tokens": 9}
    answer = read(event(**end), event(choices=[], usage=usage), event(**other), event(choices=[], usage=late))
    assert answer.predicted_tokens == 0


def test_payloads_are_whole_lines_of_data():
    raw = b":\n\nevent: x\ndata: 1\n\ndata:2\r\n\r\ndata: null\n\ndata: [DONE]\n\ndata: 3"
    assert list(stream_payloads(raw)) == [b"1", b"2", b"[DONE]"]


def test_slot_content():
    prompt, generated = array("i", [1, 2]), array("i", [3, 4])

    def content(prompt_tokens, predicted):
        return slot_content(prompt, Answer(prompt_tokens, predicted_tokens=predicted), generated)

    assert content(2, 2) == (array("i", [1, 2, 3]), 0)
    assert content(2, 3) == (array("i", [1, 2, 3, 4]), 0)
    assert content(2, 5) == (array("i", [1, 2, 3, 4]), 2)
    assert content(2, 1) == (prompt, 0)
    assert content(2, 0) == (prompt, 0)
    assert content(3, 2) == (array("i"), 4)
