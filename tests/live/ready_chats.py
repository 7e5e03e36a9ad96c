"""Chats with tools, thoughts and grammars, each sent to an engine as it is and through kvpin, which adds
token ids.

chats()          →  name and fields of 200 chats
thinking_model() →  a model that thinks: its answers begin with thoughts
different()      →  the chats whose answers differ
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from safetensors.numpy import load_file, save_file

from scripts.make_checkpoint import checkpoint_path
from tests.live.prompt_forms import WITNESS
from tests.live.server_world import MODEL, WAIT_S, ServerWorld

Fields = dict[str, Any]
COUNT, AT_ONCE = 200, 4
STRAIGHT = 4  # times that a chat is sent straight at most
SAMPLED = 16
"""The first prompts of each form, which kvpin compares with the engine's ids and sends as text."""


def _user(content: object) -> Fields:
    return {"role": "user", "content": content}


_ENDS_THOUGHTS = 0.75  # of the output head's bias, see make_gguf.py: most thoughts have a few words
_THINK, _END = "<think>", "</think>"
_TEMPLATE = WITNESS.replace(
    "<|im_start|>assistant\n{% endif",
    "<|im_start|>assistant\n<think>\n{% if enable_thinking is defined and not enable_thinking %}\n"
    "</think>\n\n{% endif %}{% endif",
)
_PORTS = ("Brest", "Gdynia", "Łeba", "横浜", "Cork")
_SCHEMA = {
    "type": "object",
    "properties": {"port": {"enum": ["Brest", "Cork"]}, "high": {"type": "boolean"}},
    "required": ["port", "high"],
    "additionalProperties": False,
}
_TOOL = {"name": "tide", "description": "The tide — 潮位", "parameters": _SCHEMA}
TOOLS = [{"type": "function", "function": _TOOL}]
_CALLED = [
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call00001",
                "type": "function",
                "function": {"name": "tide", "arguments": '{"port": "Cork", "high": true}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call00001", "content": "4.2 m"},
]
_CALL = r'<tool_call>\n\{"name": "tide", "arguments": \{"port": "(Brest|Cork)"\}\}\n</tool_call>'
_KINDS: dict[str, Fields] = {
    "thoughts": {"max_tokens": 64},
    "no thoughts": {"chat_template_kwargs": {"enable_thinking": False}},
    "earlier thoughts": {"more": [{"role": "assistant", "content": "Low.", "reasoning_content": "It ebbs."}]},
    "tools": {"tools": TOOLS, "chat_template_kwargs": {"enable_thinking": False}},
    "a call written by a grammar": {
        "tools": TOOLS,
        "tool_choice": "auto",
        "regex": _CALL,
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "a call that must be": {"tools": TOOLS, "tool_choice": "required", "max_tokens": 96},
    "a named call": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "tide"}}},
    "no call": {"tools": TOOLS, "tool_choice": "none"},
    "a call's result": {"tools": TOOLS, "more": _CALLED},
    "a schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "tide", "schema": _SCHEMA}},
        "max_tokens": 96,
    },
    "an object": {"response_format": {"type": "json_object"}, "max_tokens": 48},
    "a regular expression": {"regex": "(high|low) water, [0-9]{2} cm", "max_tokens": 96},
    "stop strings": {"stop": [" the", "a"], "max_tokens": 64},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.4, "max_tokens": 48},
    "text parts": {"more": [_user([{"type": "text", "text": "And the ebb?"}])]},
}


def chats(regex: Callable[[str], Fields]) -> Iterator[tuple[str, Fields]]:
    """The chats; `regex` gives the field in which the engine takes a regular expression."""
    for number, name in zip(range(COUNT), itertools.cycle(_KINDS), strict=False):
        fields = {"max_tokens": 32, **_KINDS[name]}
        asked = f"{number}. How high is the water in {_PORTS[number % len(_PORTS)]}? " * (1 + number % 9)
        messages = [_user(asked), *fields.pop("more", [])]
        if messages[-1]["role"] == "assistant":
            messages.append(_user("And now?"))
        if (pattern := fields.pop("regex", None)) is not None:
            fields |= regex(pattern)
        streams = {"stream": True, "stream_options": {"include_usage": True}} if number // 16 % 2 else {}
        yield name, {"model": MODEL, "temperature": 0, "messages": messages, **fields, **streams}


def thinking_model(directory: Path) -> Path:
    """Writes a checkpoint with tokens that begin and end thoughts. Its template begins them."""
    shutil.copytree(checkpoint_path("model"), directory)
    (directory / "chat_template.jinja").write_text(_TEMPLATE)
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    size = len(tokenizer["model"]["vocab"])
    for at, content in enumerate((_THINK, _END), size):
        tokenizer["added_tokens"].append({**tokenizer["added_tokens"][-1], "id": at, "content": content})
        tokenizer["added_tokens"][-1]["special"] = False
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"vocab_size": size + 2}))
    tensors = load_file(directory / "model.safetensors")
    ends = tokenizer["model"]["vocab"]["<|im_end|>"]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = tensors[name]
        tensors[name] = np.concatenate([rows, rows[[0]], np.roll(rows[[ends]], 1, axis=1)])
        tensors[name][-1, 0] = rows[ends, 0]
    tensors["lm_head.weight"][-1, 0] = _ENDS_THOUGHTS
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _of_all_forms(text: str) -> Fields:
    messages = [_user([{"type": "text", "text": text}]), *_KINDS["earlier thoughts"]["more"], _user("?")]
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
    return {"messages": [*messages, *_CALLED], "tools": TOOLS, "tool_choice": "none", **kwargs}


def different(world: ServerWorld, regex: Callable[[str], Fields]) -> tuple[list[str], Counter[str]]:
    """The chats whose answers differ between the engine and kvpin, and what the answers had. Each chat is
    computed anew, under a salt of its own. A chat whose answers differ is sent straight again: some engines
    do not answer the same chat twice alike. `had["straight, another"]` counts those."""
    differing, had = [], Counter[str]()
    with (
        httpx.Client(timeout=5 * WAIT_S, trust_env=False) as client,
        ThreadPoolExecutor(AT_ONCE) as threads,
    ):

        def ask(base: str, fields: Fields) -> Fields:
            answer = client.post(f"{base}/v1/chat/completions", json=fields)
            assert answer.is_success, answer.text
            return told(answer)

        def both(numbered: tuple[int, tuple[str, Fields]]) -> tuple[str, list[Fields], Fields]:
            number, (name, fields) = numbered
            through = ask(world.kvpin.url, fields | {"cache_salt": f"k{number}"})
            straight = list[Fields]()
            while through not in straight and len(straight) < STRAIGHT:
                salt = f"s{number}-{len(straight)}"
                straight.append(ask(world.servers[0].url, fields | {"cache_salt": salt}))
            return f"{number} {name}", straight, through

        for number in range(SAMPLED):
            ask(world.kvpin.url, {"model": MODEL, "max_tokens": 1, **_of_all_forms(f"{number}")})
        for name, straight, through in threads.map(both, enumerate(chats(regex))):
            had.update(key for key, value in through.items() if value)
            if through not in straight:
                differing.append(f"{name}: {straight} without {through}")
            elif straight[0] != through:
                had["straight, another"] += 1
    return differing, had


def told(answer: httpx.Response) -> Fields:
    """What an answer tells, without ids and times; the pieces of a stream are joined."""
    joined: Fields = {"text": "", "thoughts": "", "calls": {}, "logprobs": [], "ended": [], "usage": None}
    if answer.headers["content-type"].startswith("text/event-stream"):
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    else:
        events = [answer.json()]
    for event in events:
        if usage := event.get("usage"):
            joined["usage"] = (usage["prompt_tokens"], usage["completion_tokens"])
        for choice in event["choices"]:
            _join(joined, choice, choice.get("delta") or choice.get("message") or {})
    return joined


def _join(joined: Fields, choice: Fields, said: Fields) -> None:
    joined["text"] += said.get("content") or ""
    joined["thoughts"] += said.get("reasoning") or said.get("reasoning_content") or ""
    for number, call in enumerate(said.get("tool_calls") or []):
        written = joined["calls"].setdefault(call.get("index", number) or number, ["", ""])
        written[0] += call["function"].get("name") or ""
        written[1] += call["function"].get("arguments") or ""
    for token in (choice.get("logprobs") or {}).get("content") or []:
        joined["logprobs"].append([each["token"] for each in (token, *token["top_logprobs"])])
    if choice.get("finish_reason"):
        joined["ended"].append((choice["finish_reason"], choice.get("stop_reason")))
