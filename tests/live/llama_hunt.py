"""A hunt for corrupt KV: chats that share prefixes, and what a llama-server left alone answers to them.

Batch noise: the last bits of llama-server's logits depend on what else it computes in the same step. On the
tiny model with `-fa off`, four requests at once against one alone, the log-probability of a token differs by
0.0005 in the median and 0.003 at most of 2261 tokens, and 2 of 72 greedy answers take the other one of two
tokens that lie closer together than that. So an answer is right if it is the lone server's to the letter, or
if each of its tokens is, after those before it, the lone server's best or within `TIE` of the best. Wrong KV
says other tokens soon: from the best to the second best it is 0.5 in the median.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

TIE = 0.01
FLAGS = ("-fa", "off")
"""Flags of both servers."""

_TALK = "ship harbour tide light storm crew log night cargo port sail wind north captain größer 漢字 🚀"
_TOP = 8


@dataclass(frozen=True, slots=True)
class Said:
    texts: tuple[str, ...]
    finishes: tuple[str, ...]


@dataclass(slots=True)
class Quarry:
    """A request, and what the lone server answers."""

    path: str
    body: dict[str, Any]
    expected: Said = field(default_factory=lambda: Said((), ()))

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def target(self) -> dict[str, Any]:
        """It as the target of an admin operation."""
        name = "messages" if "messages" in self.body else "prompt"
        return {"model": self.body["model"], name: self.body[name]}


class LoneServer:
    """A llama-server with one slot that never reuses anything."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def answer(self, quarry: Quarry) -> Said:
        """What it answers to the same body."""
        fields = {
            name: value for name, value in quarry.body.items() if name not in ("stream", "stream_options")
        }
        return said_at_once(await self._post(f"/v1/{quarry.path}", {**fields, "cache_prompt": False}))

    async def strain(self, quarry: Quarry, said: Said) -> float:
        """How far from greedy: the most that a token said, after those before it, lies below the best one in
        log-probability. Infinite if it cannot have been said."""
        prompt = await self._prompt(quarry)
        pairs = zip(said.texts, said.finishes, strict=True)
        return max([await self._strain(prompt, quarry, text, finish) for text, finish in pairs])

    async def _strain(self, prompt: list[int], quarry: Quarry, text: str, finish: str) -> float:
        tokens = await self._tokenize(text)
        if finish == "length":
            is_full = len(tokens) == quarry.body["max_tokens"]
            return await self._strain_of(prompt, tokens) if is_full else math.inf
        ends = [await self._tokenize(text + stop) for stop in quarry.body.get("stop", ())]
        ends.append(tokens + await self._tokenize("<|im_end|>"))
        return min([await self._strain_of(prompt, end) for end in ends])

    async def _strain_of(self, prompt: list[int], tokens: list[int]) -> float:
        at, most = 0, 0.0
        while at < len(tokens):
            # Until it says another token; from there on it is asked again.
            for step in await self._steps(prompt + tokens[:at], len(tokens) - at):
                token = tokens[at]
                at += 1
                if step["id"] != token:
                    logprobs = {top["id"]: top["logprob"] for top in step["top_logprobs"]}
                    most = max(most, logprobs[step["id"]] - logprobs.get(token, -math.inf))
                    break
        return most

    async def _steps(self, prompt: list[int], count: int) -> list[dict[str, Any]]:
        fields = {
            "prompt": prompt,
            "n_predict": count,
            "temperature": 0,
            "n_probs": _TOP,
            "cache_prompt": False,
        }
        return (await self._post("/completion", fields))["completion_probabilities"]

    async def _prompt(self, quarry: Quarry) -> list[int]:
        if "messages" not in quarry.body:
            prompt = quarry.body["prompt"]
            return prompt if isinstance(prompt, list) else await self._tokenize(prompt)
        rendered = await self._post("/apply-template", {"messages": quarry.body["messages"]})
        return await self._tokenize(rendered["prompt"])

    async def _tokenize(self, text: str) -> list[int]:
        return (await self._post("/tokenize", {"content": text, "parse_special": True}))["tokens"]

    async def _post(self, path: str, fields: dict[str, Any]) -> Any:
        answer = await self._client.post(path, json=fields)
        answer.raise_for_status()
        return answer.json()


async def quarries(dice: random.Random, model: str, lone: LoneServer, count: int) -> list[Quarry]:
    """`count` requests and their right answers: chats that grow, and completions, in families of a prefix."""
    found: list[Quarry] = []
    while len(found) < count:
        system = _text(dice, dice.randint(20, 120))
        for _ in range(4):
            messages = [{"role": "system", "content": system}]
            for _ in range(dice.randint(2, 4)):
                messages = [*messages, {"role": "user", "content": _text(dice, dice.randint(3, 30))}]
                quarry = await _quarry(dice, model, lone, messages)
                found.append(quarry)
                messages = [*messages, {"role": "assistant", "content": quarry.expected.texts[0]}]
    return found[:count]


async def _quarry(
    dice: random.Random, model: str, lone: LoneServer, messages: list[dict[str, str]]
) -> Quarry:
    is_chat = dice.random() < 0.75
    body: dict[str, Any] = {"model": model, "max_tokens": dice.choice((1, 4, 16, 24)), "temperature": 0}
    if is_chat:
        body["messages"] = messages
    else:
        body["prompt"] = "\n".join(message["content"] for message in messages)
    quarry = Quarry("chat/completions" if is_chat else "completions", body)
    quarry.expected = await lone.answer(quarry)
    if dice.random() < 0.2:
        # A word it says ends it early: the text that led to a stop string is not in the stream.
        body["stop"] = [dice.choice(quarry.expected.texts[0].split(" ")[1:] or ["."])]
        quarry.expected = await lone.answer(quarry)
    body.update(_manner(dice, is_chat=is_chat))
    if "n" in body:
        quarry.expected = Said(quarry.expected.texts * body["n"], quarry.expected.finishes * body["n"])
    return quarry


def _manner(dice: random.Random, *, is_chat: bool) -> dict[str, Any]:
    """Fields that change how the answer comes, and not what it says."""
    fields: dict[str, Any] = {}
    if dice.random() < 0.8:
        fields["stream"] = True
        if dice.random() < 0.5:
            fields["stream_options"] = {"include_usage": True}
    if dice.random() < 0.2:
        fields |= {"logprobs": True, "top_logprobs": 2} if is_chat else {"logprobs": 2}
    if dice.random() < 0.05:
        fields["cache_prompt"] = False
    if dice.random() < 0.02:
        fields["n"] = 2
    return fields


def said_at_once(answer: dict[str, Any]) -> Said:
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    texts = tuple(c["message"]["content"] if "message" in c else c["text"] for c in choices)
    return Said(texts, tuple(choice["finish_reason"] for choice in choices))


def said_in(chunks: list[dict[str, Any]]) -> Said:
    texts: dict[int, str] = {}
    finishes: dict[int, str] = {}
    for choice in _choices(chunks):
        piece = choice["delta"].get("content") if "delta" in choice else choice["text"]
        texts[choice["index"]] = texts.get(choice["index"], "") + (piece or "")
        if choice["finish_reason"]:
            finishes[choice["index"]] = choice["finish_reason"]
    return Said(tuple(texts[n] for n in sorted(texts)), tuple(finishes[n] for n in sorted(finishes)))


def _choices(chunks: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return (choice for chunk in chunks for choice in chunk["choices"])


def _text(dice: random.Random, words: int) -> str:
    return " ".join(dice.choice(_TALK.split()) for _ in range(words))
