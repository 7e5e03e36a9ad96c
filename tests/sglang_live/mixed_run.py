"""A mixed load on a real SGLang, of every form of request. Each prediction is compared with what is reported.

Conversations grow turn by turn in random order, four requests at once, half of them as streams, over caches
too small for all. Some clients leave their streams. In the middle there are one flush and one `kill -9` of
the server.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from engine_adapter.events.fields import read_sglang_keys
from tests.live.server_world import MODEL, WAIT_S, ServerWorld, count_evictions

TALKS = 10  # at a time
AT_ONCE = 4
LEAVE, LEFT = 0.08, "the client left"  # share of the streams
LONGEST = 700  # a conversation with more prompt tokens is replaced by a new one
SYSTEMS = (
    "You are a harbour pilot. " + "Answer briefly, and name the light you steer by. " * 6,
    "You keep the log of a lighthouse. " + "Write what you see, never what you think. " * 6,
    "Jesteś latarnikiem. 灯台守。 " + "Pisz krótko: zażółć gęślą jaźń 🙂. " * 5,
)
WORDS = ("tide", "light", "chart", "wind", "knot", "sail", "anchor", "rope", "fog", "keel", "żagiel", "港")
TOOL = {
    "type": "function",
    "function": {
        "name": "tide",
        "description": "Wysokość wody — 潮位",
        "parameters": {"type": "object", "properties": {"port": {"type": "string"}}},
    },
}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass(slots=True)
class Talk:
    """A conversation that grows by a turn with each answer.

    Attributes:
        form: its key in `FORMS`.
        salt: the client's own, None for most.
        turns: role and text of each.
        busy: a request of it runs.
    """

    form: str
    salt: str | None
    turns: list[tuple[str, str]]
    prompt_tokens: int = 0
    busy: bool = False

    @property
    def text(self) -> str:
        return "\n".join(text for _, text in self.turns)

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [{"role": role, "content": text} for role, text in self.turns]


def _parts(talk: Talk) -> list[dict[str, Any]]:
    """The users' messages in two parts each."""
    messages = talk.messages
    for message in messages:
        if message["role"] == "user":
            text = message["content"]
            halves = text[: len(text) // 2], text[len(text) // 2 :]
            message["content"] = [{"type": "text", "text": half} for half in halves]
    return messages


def _called(talk: Talk) -> list[dict[str, Any]]:
    """A call and its result before each turn of the user's."""
    messages: list[dict[str, Any]] = []
    for number, message in enumerate(talk.messages):
        if message["role"] == "user" and number > 1:
            function = {"name": "tide", "arguments": json.dumps({"port": f"Kraków {number}"})}
            call = {"id": f"call_{number}", "type": "function", "function": function}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": f"call_{number}", "content": f"{number}.2 m"})
        messages.append(message)
    return messages


def _chat(**fields: Any) -> Callable[[Talk], dict[str, Any]]:
    return lambda talk: {"messages": talk.messages, "max_tokens": 12, **fields}


def _generate(talk: Talk) -> dict[str, Any]:
    return {"text": talk.text, "sampling_params": {"max_new_tokens": 12, "temperature": 0}}


def _ids(talk: Talk) -> list[int]:
    """Token ids made of the words of the text, so that the ids of a longer text begin with them."""
    return [300 + sum(map(ord, word)) % 3000 for word in talk.text.split()]


FORMS: dict[str, tuple[str, Callable[[Talk], dict[str, Any]]]] = {
    "chat": (CHAT, _chat()),
    "chat, n=2": (CHAT, _chat(n=2)),
    "parts": (CHAT, lambda talk: {"messages": _parts(talk), "max_tokens": 12}),
    "tools": (CHAT, _chat(tools=[TOOL])),
    "calls": (CHAT, lambda talk: {"messages": _called(talk), "tools": [TOOL], "max_tokens": 12}),
    "tool_choice none": (CHAT, _chat(tools=[TOOL], tool_choice="none")),
    "completion": (COMPLETIONS, lambda talk: {"prompt": talk.text, "max_tokens": 12}),
    "completion, n=2": (COMPLETIONS, lambda talk: {"prompt": talk.text, "max_tokens": 12, "n": 2}),
    "token ids": (COMPLETIONS, lambda talk: {"prompt": _ids(talk), "max_tokens": 12}),
    "response": ("/v1/responses", lambda talk: {"input": talk.messages, "max_output_tokens": 12}),
    "message": (
        "/v1/messages",
        lambda talk: {"system": talk.turns[0][1], "messages": talk.messages[1:], "max_tokens": 12},
    ),
    "generate": ("/generate", _generate),
    "generate, ids": (
        "/generate",
        lambda talk: {"input_ids": _ids(talk), "sampling_params": {"max_new_tokens": 12, "temperature": 0}},
    ),
}
"""Form → route and body of the next request of a conversation."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One request and what came of it; counts in tokens.

    Attributes:
        stage: part of the run.
        broken: why it broke off; then nothing is reported.
    """

    number: int
    stage: str
    form: str
    stream: bool
    salted: bool
    engine: str = ""
    prompt: int = 0
    predicted: int = 0
    reported: int | None = None
    why: str = ""
    broken: str = ""

    def is_exact(self, within: int) -> bool:
        """Whether it reused what was predicted, and less than `within` tokens more."""
        return self.reported is not None and 0 <= self.reported - self.predicted < within


@dataclass(slots=True)
class Report:
    """The result of the run. `within`: an engine with small pages may reuse so many tokens more."""

    within: int
    seen: list[Seen] = field(default_factory=list)
    evicted: int = 0

    @property
    def answered(self) -> list[Seen]:
        return [seen for seen in self.seen if not seen.broken]

    @property
    def misses(self) -> list[Seen]:
        return [seen for seen in self.answered if not seen.is_exact(self.within)]

    def lines(self) -> Iterator[str]:
        """The report for people."""
        answered, missed = Counter(), Counter()
        for seen in self.answered:
            for key in (seen.form, "streams" if seen.stream else "whole", seen.engine, seen.stage):
                answered[key] += 1
                missed[key] += not seen.is_exact(self.within)
        total, misses = len(self.answered), len(self.misses)
        share = 100 * (total - misses) / max(total, 1)
        reused = sum(seen.reported or 0 for seen in self.answered)
        prompts = sum(seen.prompt for seen in self.answered)
        less = sum(seen.predicted > (seen.reported or 0) for seen in self.misses)
        yield f"exact: {total - misses} of {total} ({share:.2f}%); tokens reused: {reused} of {prompts}"
        yield f"reused less than predicted: {less}; more: {misses - less}"
        yield f"blocks evicted: {self.evicted}"
        yield from (f"  {key}: {count - missed[key]} of {count}" for key, count in answered.items())
        yield f"broken off: {dict(Counter((s.stage, s.broken[:80]) for s in self.seen if s.broken))}"
        yield from (f"missed: {seen}" for seen in self.misses)


class MixedRun:
    """The run: `await play(300)`."""

    def __init__(
        self, world: ServerWorld, *, within: int = 1, seed: int = 1, forms: tuple[str, ...] = tuple(FORMS)
    ) -> None:
        self._world = world
        self._dice = random.Random(seed)  # noqa: S311 - not for secrets
        self._forms = forms
        self._talks = [self._new_talk(form) for form in forms]
        self.report = Report(within)

    async def play(self, requests: int, *, restarts: bool = True) -> Report:
        """Sends this many requests, four at a time."""
        async with self._running():
            await self._together("at first", round(requests * 0.4))
            await self._flush()
            await self._together("after a flush", round(requests * 0.3))
            if restarts:
                await self._restart()
            await self._together("at last", requests - len(self.report.seen))
        return self.report

    async def churn(self, minutes: float) -> Report:
        """Sends requests four at a time until these minutes are over, flushed and killed in turn."""
        end_s = time.monotonic() + 60 * minutes
        async with self._running():
            while time.monotonic() < end_s:
                await self._together("before a flush", 40)
                await self._flush()
                await self._together("after a flush", 40)
                await self._restart()
        return self.report

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        """Opens the client, and counts evictions."""
        first = self._world.servers[0].event_port
        async with httpx.AsyncClient(
            base_url=self._world.kvpin.url, timeout=WAIT_S, trust_env=False
        ) as self._client:
            counters = [
                asyncio.create_task(count_evictions(first + rank, read_sglang_keys, self._add_evicted))
                for rank in range(len(self._world.engines[0]))
            ]
            yield
            for counter in counters:
                counter.cancel()
            await asyncio.gather(*counters, return_exceptions=True)

    async def _flush(self) -> None:
        await asyncio.to_thread(self._world.admin, "flush", {"all": True})

    async def _restart(self) -> None:
        """Kills the server and starts it again; a few requests come meanwhile."""
        restart = asyncio.create_task(asyncio.to_thread(self._world.restart))
        await self._together("while it restarts", 5)
        await restart
        await asyncio.to_thread(self._world.until_exact)

    def _add_evicted(self, blocks: int) -> None:
        self.report.evicted += blocks

    def _new_talk(self, form: str) -> Talk:
        salt = f"own-{self._dice.randrange(3)}" if self._dice.random() < 0.15 else None
        return Talk(form, salt, [("system", self._dice.choice(SYSTEMS))])

    async def _together(self, stage: str, count: int) -> None:
        numbers = iter(range(len(self.report.seen), len(self.report.seen) + count))

        async def work() -> None:
            for number in numbers:
                self.report.seen.append(await self._turn(number, stage))

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(work())

    def _choose(self) -> Talk:
        """A conversation that waits, with its next question."""
        at = self._dice.choice([at for at, talk in enumerate(self._talks) if not talk.busy])
        if self._talks[at].prompt_tokens > LONGEST:
            self._talks[at] = self._new_talk(self._dice.choice(self._forms))
        talk = self._talks[at]
        talk.busy = True
        if talk.turns[-1][0] != "user":
            words = self._dice.choices(WORDS, k=self._dice.randint(12, 40))
            talk.turns.append(("user", " ".join(words)))
        return talk

    async def _turn(self, number: int, stage: str) -> Seen:
        talk, stream = self._choose(), self._dice.random() < 0.5
        path, make = FORMS[talk.form]
        body = {"model": MODEL, "temperature": 0, "stream": stream, **make(talk)}
        if talk.salt:
            body["cache_salt"] = talk.salt
        seen = Seen(number, stage, talk.form, stream, talk.salt is not None)
        request_id = f"mixed-{number}"
        leaves = stream and self._dice.random() < LEAVE
        try:
            headers, text = await self._send(path, body, request_id, leaves=leaves)
            if leaves:
                return replace(seen, broken=LEFT)
            record = await asyncio.to_thread(self._world.record, request_id)
        except (httpx.HTTPError, AssertionError) as error:
            return replace(seen, broken=f"{type(error).__name__}: {error}")
        finally:
            talk.busy = False
        talk.turns.append(("assistant", text or "-"))
        talk.prompt_tokens = record["n_tokens"] or LONGEST + 1
        return replace(
            seen,
            engine=headers["x-kvpin-engine"],
            prompt=record["n_tokens"] or 0,
            predicted=int(headers["x-kvpin-predicted-tokens"]),
            reported=record["reported_tokens"],
            why=record["explanation"],
        )

    async def _send(
        self, path: str, body: dict[str, Any], request_id: str, *, leaves: bool
    ) -> tuple[httpx.Headers, str]:
        """The answer's headers and its text; of a client that leaves, what came first of it."""
        headers = {"x-request-id": request_id}
        async with self._client.stream("POST", path, json=body, headers=headers) as answer:
            if not body["stream"]:
                raw = await answer.aread()
                assert answer.is_success, raw
                assert b"sglext" not in raw, raw
                return answer.headers, _text_of(json.loads(raw))
            assert answer.is_success, await answer.aread()
            if leaves:
                return answer.headers, await anext(aiter(_texts(answer)), "")
            texts = [text async for text in _texts(answer)]
            return answer.headers, texts[-1] if path == "/generate" and texts else "".join(texts)


async def _texts(answer: httpx.Response) -> AsyncIterator[str]:
    async for line in answer.aiter_lines():
        assert "sglext" not in line, line
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event or event["error"] is None, event
            yield _text_of(event)


def _text_of(answer: dict[str, Any]) -> str:
    """The text of an answer, or of an event of a stream, of any API."""
    if choices := answer.get("choices"):
        first = choices[0]
        if first["index"]:
            return ""
        said = first.get("message") or first.get("delta") or first
        return said.get("content") or said.get("text") or ""
    if answer.get("type") == "response.output_text.delta":
        return answer["delta"]
    if answer.get("type") == "content_block_delta":
        return answer["delta"].get("text") or ""
    items = answer.get("output") or ([answer] if isinstance(answer.get("content"), list) else [])
    parts = "".join(part.get("text", "") for item in items for part in item.get("content") or [])
    return parts or answer.get("text") or ""
