"""A mixed load through the openai SDK. Each prediction is compared with what the engine reports.

Conversations of two tenants grow turn by turn in random order, some with their own salt, some with a LoRA
adapter: chats and completions, streamed or not, with usage or without, over caches too small for all. In the
middle there are one flush and one `kill -9` of an engine.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from openai import APIError, AsyncOpenAI

from engine_adapter.events.fields import read_vllm_keys
from tests.live.server_world import MODEL, WAIT_S, ServerWorld, count_evictions
from tests.vllm_live.vllm_world import LORA, VllmOptions

OPTIONS = VllmOptions(blocks=160, context=1024)
KEYS = {"red": "key-of-red", "blue": "key-of-blue"}
KVPIN_FLAGS = tuple(f"--api-key={key}" for key in KEYS.values())
"""Flags of `kvpin serve`: each key is its own tenant."""

TALKS = 8  # at a time
LONGEST = 700  # a conversation with more prompt tokens is replaced by a new one
ANSWER = 16  # tokens
SYSTEMS = (
    "You are a harbour pilot. " + "Answer briefly, and name the light you steer by. " * 6,
    "You keep the log of a lighthouse. " + "Write what you see, never what you think. " * 6,
    "Jesteś latarnikiem. 灯台守。 " + "Pisz krótko: zażółć gęślą jaźń 🙂. " * 5,
)
WORDS = (
    "tide",
    "light",
    "chart",
    "wind",
    "knot",
    "sail",
    "anchor",
    "rope",
    "fog",
    "keel",
    "buoy",
    "żagiel",
    "港",
)


@dataclass(slots=True)
class Talk:
    """A conversation that grows by a turn with each answer.

    Attributes:
        tenant: whose it is.
        model: served name, or the LoRA adapter's.
        chat: by chat completions, else by completions.
        salt: the client's own, None for most.
        messages: so far; of a completion its text, in one.
    """

    tenant: str
    model: str
    chat: bool
    salt: str | None
    messages: list[dict[str, str]]
    prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Seen:
    """One request and what came of it; counts in tokens.

    Attributes:
        number: of the request, from 0.
        stage: part of the run.
        kind: kind of request, in words.
        engine: the engine that served it.
        at_once: requests sent together, itself included.
        predicted: from the answer's header.
        reported: by the engine, from the usage if the client asked for it, else as kvpin read it.
        why: kvpin's explanation.
        broken: why it broke off; then nothing is reported.
    """

    number: int
    stage: str
    kind: str
    engine: str = ""
    at_once: int = 1
    prompt: int = 0
    predicted: int = 0
    reported: int = 0
    why: str = ""
    broken: str = ""

    @property
    def exact(self) -> bool:
        """Whether the prediction was exact."""
        return self.predicted == self.reported

    def __str__(self) -> str:
        return (
            f"request {self.number} {self.stage}, {self.at_once} at a time ({self.kind}, {self.prompt} "
            f"tokens): predicted {self.predicted}, reported {self.reported}; {self.why}"
        )


@dataclass(slots=True)
class Report:
    """The result of the run: each request, and the number of evicted blocks."""

    seen: list[Seen] = field(default_factory=list)
    evicted: int = 0

    def answered(self, *, alone: bool | None = None) -> list[Seen]:
        """Answered requests; with `alone`, only those sent alone or only the others."""
        return [s for s in self.seen if not s.broken and alone in (None, s.at_once == 1)]

    def misses(self, *, alone: bool | None = None) -> list[Seen]:
        """Requests with a wrong prediction."""
        return [seen for seen in self.answered(alone=alone) if not seen.exact]

    def imagined(self) -> list[Seen]:
        """Requests that reused less than predicted."""
        return [seen for seen in self.answered() if seen.predicted > seen.reported]

    def lines(self) -> Iterator[str]:
        """The report for people."""
        for label, alone in (("one at a time", True), ("four at a time", False)):
            seen = self.answered(alone=alone)
            exact = sum(s.exact for s in seen)
            cached, prompt = sum(s.reported for s in seen), sum(s.prompt for s in seen)
            share = 100 * cached / prompt if prompt else 0.0
            yield f"{label}: {exact} of {len(seen)} exact; {cached} of {prompt} tokens reused ({share:.1f}%)"
        by_stage = Counter(seen.stage for seen in self.answered())
        yield f"answered: {dict(by_stage)}; by engine: {dict(Counter(s.engine for s in self.answered()))}"
        yield f"blocks evicted: {self.evicted}"
        yield f"kinds: {dict(Counter(seen.kind for seen in self.answered()))}"
        yield f"predicted hits that did not happen: {len(self.imagined())}"
        yield f"broken off: {[f'{s.number} {s.stage}: {s.broken}' for s in self.seen if s.broken]}"
        yield from (f"missed: {seen}" for seen in self.misses())


class Mix:
    """Draws the next conversation and the form of its request.

    `chats`, `loras`: the shares of conversations that are chats, and that use the LoRA adapter.
    """

    def __init__(self, seed: int, talks: int, chats: float, loras: float) -> None:
        self._dice = random.Random(seed)  # noqa: S311 - not for secrets
        self._chats, self._loras = chats, loras
        self._talks = [self._new_talk() for _ in range(talks)]

    def turns(self, count: int) -> list[Talk]:
        """`count` different conversations, each with its next question."""
        for at, talk in enumerate(self._talks):
            if talk.prompt_tokens > LONGEST:
                self._talks[at] = self._new_talk()
        chosen = self._dice.sample(self._talks, count)
        for talk in chosen:
            self._ask(talk)
        return chosen

    def manner(self) -> dict[str, Any]:
        """Streamed or not, with usage or without."""
        streamed = {"stream": True}
        with_usage = streamed | {"stream_options": {"include_usage": True}}
        return self._dice.choice(({}, streamed, with_usage))

    def _new_talk(self) -> Talk:
        chat = self._dice.random() < self._chats
        system = self._dice.choice(SYSTEMS)
        start = {"role": "system", "content": system} if chat else {"role": "text", "content": system}
        return Talk(
            tenant=self._dice.choice(sorted(KEYS)),
            model=LORA if self._dice.random() < self._loras else MODEL,
            chat=chat,
            salt="the client's own" if self._dice.random() < 0.15 else None,
            messages=[start],
        )

    def _ask(self, talk: Talk) -> None:
        if talk.chat and talk.messages[-1]["role"] == "user":
            return  # its last question has no answer
        question = " ".join(self._dice.choices(WORDS, k=self._dice.randint(12, 40)))
        if talk.chat:
            talk.messages.append({"role": "user", "content": question})
        else:
            talk.messages[0]["content"] += f"\n{question}\n"


class MixedRun:
    """The run: `await play(300)`."""

    def __init__(
        self,
        world: ServerWorld,
        *,
        seed: int = 1,
        talks: int = TALKS,
        chats: float = 0.7,
        loras: float = 0.3,
    ) -> None:
        self._world = world
        self._mix = Mix(seed, talks, chats, loras)
        self._report = Report()
        self._clients: dict[str, AsyncOpenAI] = {}

    async def play(self, requests: int) -> Report:
        """Sends this many requests, about two thirds one at a time, the others four at a time."""

        def share(part: float) -> int:
            return round(requests * part)

        async with self._connected():
            await self._alone("at first", share(0.3))
            await asyncio.to_thread(self._world.admin, "flush", {"all": True})
            await self._alone("after a flush", share(0.15))
            await self._together("after a flush", share(0.15))
            restart = asyncio.create_task(self._together("while an engine is killed", share(0.1)))
            await asyncio.to_thread(self._world.restart, 1)
            await restart
            await asyncio.to_thread(self._world.until_exact, 1)
            await self._alone("after a restart", share(0.2))
            await self._together("after a restart", requests - len(self._report.seen))
        return self._report

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[None]:
        for tenant, key in KEYS.items():
            self._clients[tenant] = AsyncOpenAI(
                base_url=self._world.kvpin.base_url, api_key=key, max_retries=0, timeout=WAIT_S
            )
        counters = [
            asyncio.create_task(count_evictions(server.event_port, read_vllm_keys, self._add_evicted))
            for server in self._world.servers
        ]
        try:
            yield
        finally:
            for counter in counters:
                counter.cancel()
            await asyncio.gather(*counters, return_exceptions=True)
            await asyncio.gather(*(client.close() for client in self._clients.values()))

    def _add_evicted(self, blocks: int) -> None:
        self._report.evicted += blocks

    async def _alone(self, stage: str, count: int) -> None:
        for _ in range(count):
            await self._all(stage, self._mix.turns(1))

    async def _together(self, stage: str, count: int) -> None:
        while count > 0:
            turns = self._mix.turns(min(count, 4))
            await self._all(stage, turns)
            count -= len(turns)

    async def _all(self, stage: str, talks: Iterable[Talk]) -> None:
        talks = list(talks)
        first = len(self._report.seen)
        asked = [
            self._turn(first + at, stage, talk, self._mix.manner(), len(talks))
            for at, talk in enumerate(talks)
        ]
        self._report.seen += await asyncio.gather(*asked)

    async def _turn(self, number: int, stage: str, talk: Talk, manner: dict[str, Any], at_once: int) -> Seen:
        words = [
            "chat" if talk.chat else "completion",
            "stream with usage" if "stream_options" in manner else "stream" if manner else "",
            f"LoRA {LORA}" if talk.model == LORA else "",
            "salt" if talk.salt else "",
        ]
        kind = ", ".join(filter(None, words))
        request_id = f"mixed-{number}"
        try:
            headers, text, usage = await self._send(talk, manner, request_id)
        except APIError as error:
            return Seen(number, stage, kind, at_once=at_once, broken=f"{type(error).__name__}: {error}")
        record = await asyncio.to_thread(self._world.record, request_id)
        assert usage in (None, record["reported_tokens"]), (usage, record)
        if talk.chat:
            talk.messages.append({"role": "assistant", "content": text})
        else:
            talk.messages[0]["content"] += text
        talk.prompt_tokens = record["n_tokens"]
        return Seen(
            number,
            stage,
            kind,
            headers["x-kvpin-engine"],
            at_once,
            record["n_tokens"],
            int(headers["x-kvpin-predicted-tokens"]),
            record["reported_tokens"],
            record["explanation"],
        )

    async def _send(
        self, talk: Talk, manner: dict[str, Any], request_id: str
    ) -> tuple[dict[str, str], str, int | None]:
        """The answer's headers, its text, and the cached tokens of its usage where it has one."""
        client = self._clients[talk.tenant]
        asked = {
            "model": talk.model,
            "max_tokens": ANSWER,
            "temperature": 0,
            "extra_headers": {"x-request-id": request_id},
            "extra_body": {"cache_salt": talk.salt} if talk.salt else None,
            **manner,
        }
        if talk.chat:
            raw = await client.chat.completions.with_raw_response.create(messages=talk.messages, **asked)
        else:
            raw = await client.completions.with_raw_response.create(
                prompt=talk.messages[0]["content"], **asked
            )
        answer = raw.parse()
        if not manner:
            choice = answer.choices[0]
            text = choice.message.content if talk.chat else choice.text
            return raw.headers, text, answer.usage.prompt_tokens_details.cached_tokens
        text, usage = "", None
        async for chunk in answer:
            for choice in chunk.choices:
                text += (choice.delta.content if talk.chat else choice.text) or ""
            usage = chunk.usage or usage
        assert (usage is not None) is ("stream_options" in manner)
        return raw.headers, text, usage and usage.prompt_tokens_details.cached_tokens
