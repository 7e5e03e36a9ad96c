"""What clients get for several choices, logprobs, an echo, a structure and tools: on a real engine."""

from __future__ import annotations

import json
import threading
import time
from types import SimpleNamespace
from typing import ClassVar

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from engine_adapter.prompt.chat import ChatTokenizer
from engine_adapter.torch_engine.answers import CompletionWriter, TokenBytes
from engine_adapter.torch_engine.completions import _shows_special
from engine_adapter.torch_engine.grammar import ToolUse
from engine_adapter.torch_engine.kv_tree import EXPECTED
from engine_adapter.torch_engine.tool_calls import HERMES, MISTRAL
from engine_adapter.types import TOOL_S, token_array
from tests.engine_adapter.torch_engine.test_answers import like_llama_2s

PROMPT = "The ship came to the harbour, and "
HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"x": {"type": "integer", "maximum": 99}, "kind": {"enum": ["a", "b"]}},
    "required": ["x", "kind"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 7, "kind": "a"}}\n</tool_call>'


async def ask(client, path="completions", **fields):
    base = {"prompt": PROMPT} if path == "completions" else {"messages": HELLO}
    answer = await client.post(f"/v1/{path}", json={**base, "max_tokens": 12, "temperature": 0, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def chat(client, **fields):
    made = await ask(client, "chat/completions", **fields)
    ChatCompletion.model_validate(made, strict=True)
    return made


async def events(client, path="completions", **fields):
    base = {"prompt": PROMPT} if path == "completions" else {"messages": HELLO}
    body = {**base, "max_tokens": 12, "temperature": 0, "stream": True, **fields}
    answer = await client.post(f"/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    made = [json.loads(line) for line in lines[:-1]]
    if path == "chat/completions":
        for chunk in made:
            ChatCompletionChunk.model_validate(chunk, strict=True)
            assert chunk["id"] == made[0]["id"]
        assert made[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    return made


class TestChoices:
    @pytest.mark.parametrize("path", ["completions", "chat/completions"])
    async def test_each_has_the_seed_after_the_one_before(self, client, path):
        fields = {"temperature": 1.5, "seed": 5, "n": 3}
        made = await ask(client, path, **fields)
        alone = [await ask(client, path, **(fields | {"seed": 5 + index, "n": 1})) for index in range(3)]
        shown = "text" if path == "completions" else "message"
        assert [choice["index"] for choice in made["choices"]] == [0, 1, 2]
        assert [choice[shown] for choice in made["choices"]] == [one["choices"][0][shown] for one in alone]
        assert made["usage"]["prompt_tokens"] == alone[0]["usage"]["prompt_tokens"]
        completion = sum(one["usage"]["completion_tokens"] for one in alone)
        assert made["usage"]["completion_tokens"] == completion

    async def test_a_stream_has_the_same_choices(self, client):
        fields = {"temperature": 1.5, "seed": 5, "n": 3}
        whole = await chat(client, **fields)
        fields["stream_options"] = {"include_usage": True}
        *chunks, last = await events(client, "chat/completions", **fields)
        texts, reasons = ["", "", ""], [[], [], []]
        for choice in (choice for chunk in chunks for choice in chunk["choices"]):
            texts[choice["index"]] += choice["delta"].get("content") or ""
            reasons[choice["index"]].append(choice["finish_reason"])
        assert texts == [choice["message"]["content"] for choice in whole["choices"]]
        assert all(each[-1] and not any(each[:-1]) for each in reasons)
        assert last["usage"]["total_tokens"] == whole["usage"]["total_tokens"]

    async def test_a_stop_string_ends_one_choice_alone(self, client):
        fields = {"temperature": 1.5, "seed": 9, "n": 4, "max_tokens": 24}
        texts = [choice["text"] for choice in (await ask(client, **fields))["choices"]]
        stop = texts[2][6:9]
        ended = await ask(client, stop=stop, **fields)
        for text, choice in zip(texts, ended["choices"], strict=True):
            assert choice["text"] == text.partition(stop)[0]
            assert (choice["finish_reason"] == "stop") is (stop in text)


class TestEcho:
    async def test_with_logprobs_of_the_prompt(self, client):
        made = await ask(client, echo=True, logprobs=2, max_tokens=3, return_token_ids=True)
        choice, logprobs = made["choices"][0], made["choices"][0]["logprobs"]
        assert choice["text"].startswith(PROMPT)
        assert "".join(logprobs["tokens"]) == choice["text"]
        assert len(choice["token_ids"]) == 3
        assert made["usage"]["completion_tokens"] == 3
        assert logprobs["token_logprobs"][0] is None
        assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
        for text, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert choice["text"][offset:].startswith(text)
        assert all(len(best) in (2, 3) for best in logprobs["top_logprobs"][1:])

    async def test_a_space_between_prompt_and_answer_is_kept(self, client, served_engine, monkeypatch):
        tokenizer = like_llama_2s()
        (ok,) = tokenizer.encode("ok", add_special_tokens=False)
        for name, value in (("tokenizer", tokenizer), ("token_bytes", TokenBytes(tokenizer))):
            monkeypatch.setattr(served_engine.service, name, value)
        fields = {"prompt": "ok", "max_tokens": 2, "logit_bias": {ok: 100}}
        (choice,) = (await ask(client, echo=True, **fields))["choices"]
        assert choice["text"] == "ok ok ok"
        (choice,) = (await ask(client, answer_token_ids=[ok], logprobs=0, **fields))["choices"]
        assert (choice["text"], choice["logprobs"]["text_offset"]) == (" ok", [3])

    @pytest.mark.parametrize(
        ("prompt", "offsets"), [("a b", [0, 0, 1, 3]), ("<|im_end|>a b", [0, 0, 10, 11, 13])]
    )
    async def test_an_offset_counts_no_special_token_that_has_no_text(
        self, client, served_engine, monkeypatch, prompt, offsets
    ):
        """The tokenizer puts one before the text."""
        service = served_engine.service
        first, encode = token_array([1]), service.encode
        monkeypatch.setattr(service, "encode", lambda *given, **options: first + encode(*given, **options))
        (choice,) = (await ask(client, prompt=prompt, echo=True, logprobs=0, max_tokens=1))["choices"]
        assert choice["logprobs"]["text_offset"] == offsets
        for text, offset in list(zip(choice["logprobs"]["tokens"], offsets, strict=True))[1:]:
            assert choice["text"][offset:].startswith(text)

    async def test_the_prompts_logprobs_are_those_of_generation(self, client):
        made = await ask(client, logprobs=0, max_tokens=6, ignore_eos=True, return_token_ids=True)
        tokens = made["prompt_token_ids"] + made["choices"][0]["token_ids"]
        again = await ask(client, prompt=[tokens], echo=True, logprobs=0, max_tokens=0)
        assert (again["choices"][0]["finish_reason"], again["usage"]["completion_tokens"]) == ("length", 0)
        echoed = again["choices"][0]["logprobs"]["token_logprobs"][-6:]
        assert echoed == pytest.approx(made["choices"][0]["logprobs"]["token_logprobs"], abs=1e-3)

    @pytest.mark.parametrize("stream", [False, True])
    async def test_many_logprobs_are_not_written_on_the_event_loop(self, client, monkeypatch, stream):
        threads, written = set(), CompletionWriter.logprobs

        def noting(*given):
            threads.add(threading.current_thread().name.partition("_")[0])
            return written(*given)

        monkeypatch.setattr(CompletionWriter, "logprobs", noting)
        fields = {"echo": True, "logprobs": 5, "max_tokens": 1, "stream": stream}
        for prompt in ([9] * 3, [9] * 60):
            threads.clear()
            body = {"prompt": prompt, **fields}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            assert ("off-loop" in threads) is (len(prompt) == 60)

    async def test_of_several_choices_streamed(self, client):
        fields = {"echo": True, "logprobs": 1, "n": 2, "temperature": 1.2, "seed": 3}
        whole = await ask(client, **fields)
        streamed: list[dict[str, list]] = [{"text": [], "tokens": []} for _ in range(2)]
        for chunk in await events(client, **fields):
            for choice in chunk["choices"]:
                streamed[choice["index"]]["text"].append(choice["text"])
                streamed[choice["index"]]["tokens"] += (choice["logprobs"] or {}).get("tokens", [])
        for choice in whole["choices"]:
            assert "".join(streamed[choice["index"]]["text"]) == choice["text"]
            assert streamed[choice["index"]]["tokens"] == choice["logprobs"]["tokens"]
            assert choice["text"].startswith(PROMPT)


def test_special_tokens_are_shown_where_calls_begin_with_one(tokenizer_dir):
    tokenizer = ChatTokenizer.load(str(tokenizer_dir))
    tokenizer.transformers.add_tokens([MISTRAL.opens], special_tokens=True)
    service = SimpleNamespace(tokenizer=tokenizer)
    assert _shows_special(service, ToolUse(format_=MISTRAL))
    assert not _shows_special(service, ToolUse(format_=HERMES))


async def test_logprobs_of_a_chat_have_all_bytes(client):
    made = await chat(client, temperature=2, seed=1, max_tokens=60, logprobs=True, top_logprobs=2)
    choice = made["choices"][0]
    entries = choice["logprobs"]["content"]
    content = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert content.decode(errors="replace").startswith(choice["message"]["content"].rstrip("\ufffd"))
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
STRICT = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": SCHEMA}}]
STRUCTURES = {
    "response_format": {"response_format": FORMAT},
    "structured_outputs": {"structured_outputs": {"choice": ["a"]}},
    "guided": {"guided_regex": "(a)?"},
    "a required call": {"tools": TOOLS, "tool_choice": "required"},
    "strict tools": {"tools": STRICT},
}


class TestStructure:
    @pytest.mark.parametrize("path", ["completions", "chat/completions"])
    async def test_an_answer_keeps_to_its_schema(self, client, path):
        fields = {"response_format": FORMAT, "max_tokens": 300, "n": 2, "temperature": 1.5, "seed": 4}
        for choice in (await ask(client, path, **fields))["choices"]:
            found = json.loads(choice["text"] if path == "completions" else choice["message"]["content"])
            assert set(found) == {"x", "kind"}
            assert choice["finish_reason"] == "stop"

    async def test_the_beginning_of_a_stop_string_is_shown_at_its_end(self, client):
        choice = (await ask(client, guided_choice=["ab"], stop="bc"))["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")

    async def test_the_answer_goes_on_within_it(self, client):
        fields = {"guided_regex": "abcdefgh", "return_token_ids": True}
        ids = (await ask(client, **fields))["choices"][0]["token_ids"]
        rest = await ask(client, answer_token_ids=ids[:2], **fields)
        assert rest["choices"][0]["token_ids"] == ids[2:]


class TestMinTokens:
    """A structure says itself where the answer ends."""

    @pytest.mark.parametrize(("name", "value"), [("min_tokens", 5), ("ignore_eos", True)])
    @pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)
    async def test_excludes_structures(self, client, structure, name, value):
        fields = {"messages": HELLO, name: value, "stream": True}
        answer = await client.post("/v1/chat/completions", json={**fields, **structure})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)

    async def test_with_end_tokens_alone_left_is_the_clients_fault(self, client, served_engine):
        model = served_engine.service.model
        others = sorted(set(range(model.vocab_size)) - model.eos_token_ids)
        for _ in range(6):  # more often than an engine may fail
            fields = {"prompt": PROMPT, "min_tokens": 1, "stop_token_ids": others}
            answer = await client.post("/v1/completions", json=fields)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "min_tokens")
        assert served_engine.service.engine.alive


class TestTools:
    NAMED: ClassVar = {"type": "function", "function": {"name": "f"}}

    async def test_the_prompt_of_a_tool_call_is_retained_for_seconds(self, client, served_engine):
        def retained(cache):
            now = time.monotonic()
            owners = cache.tree.kept._owners
            return [node.kept_until - now for node, owner in owners.items() if owner is EXPECTED]

        fields = {"tools": TOOLS, "guided_choice": [CALL], "max_tokens": 100, "keep_for": "agent"}
        await chat(client, **fields, tool_choice="none")
        assert served_engine.service.engine.call(retained).result(10) == []
        await events(client, "chat/completions", **fields)
        seconds = served_engine.service.engine.call(retained).result(10)
        assert 0 < max(seconds) <= TOOL_S + 1

    @pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
    async def test_a_call_that_must_be_made(self, client, served_engine, choice):
        fields = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 600, "parallel_tool_calls": False}
        made = (await chat(client, **fields))["choices"][0]
        (call,) = made["message"]["tool_calls"]
        assert made["message"]["content"] is None
        assert made["finish_reason"] == ("tool_calls" if choice == "required" else "stop")
        assert call["function"]["name"] == "f"
        assert set(json.loads(call["function"]["arguments"])) == {"x", "kind"}
        arguments, ids = "", []
        for chunk in await events(client, "chat/completions", **fields):
            for part in chunk["choices"][0]["delta"].get("tool_calls", ()):
                arguments += part["function"]["arguments"]
                ids += [part["id"]] if "id" in part else []
        assert arguments == call["function"]["arguments"]
        assert len(ids) == 1

    @pytest.mark.parametrize(("choice", "is_read"), [("auto", True), (None, True), ("none", False)])
    async def test_a_call_that_the_model_makes(self, client, choice, is_read):
        fields = {"tools": TOOLS, "tool_choice": choice, "guided_choice": [CALL], "max_tokens": 100}
        made = (await chat(client, **fields))["choices"][0]
        if is_read:
            function = made["message"]["tool_calls"][0]["function"]
            assert function == {"name": "f", "arguments": '{"x": 7, "kind": "a"}'}
            assert made["finish_reason"] == "tool_calls"
        else:
            assert made["message"]["content"] == CALL
        chunks = await events(client, "chat/completions", **fields)
        assert any("tool_calls" in chunk["choices"][0]["delta"] for chunk in chunks) is is_read

    async def test_an_answer_goes_on_inside_a_call(self, client, served_engine):
        fields = {"tools": TOOLS, "guided_choice": [f"Hi {CALL}"], "max_tokens": 99, "return_token_ids": True}
        ids = (await chat(client, **fields))["choices"][0]["token_ids"]
        tokenizer = served_engine.service.tokenizer
        for cut in range(0, len(ids), 5):
            rest = (await chat(client, answer_token_ids=ids[:cut], **fields))["choices"][0]
            is_told = "}}" in tokenizer.decode(ids[:cut])
            assert len(rest["message"].get("tool_calls", ())) == (not is_told)
            assert rest["finish_reason"] == "tool_calls"

    async def test_an_answer_that_is_cut_short_after_a_call_ends_so(self, client):
        fields = {"tools": TOOLS, "guided_choice": [f"{CALL} and so on and on"], "return_token_ids": True}
        ids = (await chat(client, **fields, max_tokens=100))["choices"][0]["token_ids"]
        made = (await chat(client, **fields, max_tokens=len(ids) - 2))["choices"][0]
        assert (len(made["message"]["tool_calls"]), made["finish_reason"]) == (1, "length")
