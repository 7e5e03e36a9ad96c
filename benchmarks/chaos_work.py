"""The clients of `chaos.py`: their requests, and the check of each answer.

Every prompt is greedy, so that one answer is right. That of a mock is a function of the prompt. The others
are asked of the engine itself before anything disturbs it. A chat goes on with the right answers.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
from chaos_engines import EMBEDDED, LLAMA, MOCK
from migration import EMBEDDED_TIE, LLAMA_TIE
from router_work import answer_ids, text_of, tokenizer, words

from engine_adapter import EngineUnavailable, Headers, HttpTransport, IncomingResponse, OutgoingRequest

CHATS, TURNS = 12, 4
"""Chats with engines that have a model, and turns of every chat."""
SYSTEM_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 160, (20, 80), (16, 48)
HUNG_S = 180.0
"""A client that hears nothing for this long hangs."""
THINKING_S = (0.2, 3.0)
SLOW_READ_S = 0.3
_TIES = {EMBEDDED: EMBEDDED_TIE, LLAMA: LLAMA_TIE}
_Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Right:
    """A request and its answer.

    Attributes:
        text: what an undisturbed engine says.
        tie_at: where in it the two best tokens are so close that rounding decides.
    """

    body: dict[str, Any]
    text: str
    tie_at: int

    def matches(self, text: str) -> bool:
        """Returns whether the text is the expected answer, up to the first near tie."""
        return text == self.text or text[: self.tie_at] == self.text[: self.tie_at] != self.text

    def begins(self, text: str) -> bool:
        """Returns whether the text is a beginning of the expected answer."""
        return self.text[: self.tie_at].startswith(text[: self.tie_at])


@dataclass(slots=True)
class Answer:
    """The outcome of a request.

    Attributes:
        fate: in words; `WRONG` and `HUNG` are in capitals.
        engine: the first one, if the answer has begun.
        status: 0 without one.
        detail: the error, or what is wrong.
    """

    model: str
    began: float
    fate: str = ""
    ended: float = 0.0
    engine: str = ""
    status: int = 0
    detail: str = ""

    @property
    def is_error(self) -> bool:
        """Returns whether the client got no whole answer."""
        return self.fate in {"refused", "ended with an error event", "BROKEN OFF", "WRONG", "HUNG"}


class Talks:
    """Chats for all models."""

    def __init__(self, models: Sequence[str], dice: random.Random) -> None:
        self._dice = dice
        self._models = list(models)
        self._words = tuple(words())
        self._systems = [self._text(SYSTEM_TOKENS) for _ in range(6)]
        self._known: dict[str, list[list[Right]]] = {}

    async def learn(self, model: str, url: str) -> None:
        """Asks the engine at `url` for the right answers, one after the other."""
        async with httpx.AsyncClient(base_url=url, timeout=300) as client:
            self._known[model] = [await self._one_chat(client, model) for _ in range(CHATS)]

    async def _one_chat(self, client: httpx.AsyncClient, model: str) -> list[Right]:
        chat, messages = [], [{"role": "system", "content": self._dice.choice(self._systems)}]
        for _ in range(TURNS):
            messages = [*messages, self._question()]
            body = self._body(model, messages)
            more = {"logprobs": True, "top_logprobs": 2, "cache_prompt": False}
            answer = await client.post("/v1/chat/completions", json=body | more)
            choice = answer.raise_for_status().json()["choices"][0]
            text = choice["message"]["content"]
            chat.append(Right(body, text, _tie_at(choice["logprobs"]["content"], _TIES[model])))
            messages = [*messages, {"role": "assistant", "content": text}]
        return chat

    def draw(self) -> Iterator[Right]:
        """The turns of a chat."""
        model = self._dice.choice(self._models)
        return iter(self._dice.choice(self._known[model])) if model in self._known else self._mock_chat()

    def _mock_chat(self) -> Iterator[Right]:
        messages = [{"role": "system", "content": self._dice.choice(self._systems)}]
        for _ in range(TURNS):
            messages = [*messages, self._question()]
            body = self._body(MOCK, messages)
            text = text_of(answer_ids(tokenizer().chat(messages).token_ids, body["max_tokens"]))
            yield Right(body, text, len(text))
            messages = [*messages, {"role": "assistant", "content": text}]

    def _question(self) -> _Message:
        return {"role": "user", "content": self._text(self._dice.randint(*QUESTION_TOKENS))}

    def _body(self, model: str, messages: list[_Message]) -> dict[str, Any]:
        tokens = self._dice.randint(*ANSWER_TOKENS)
        greedy = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}
        return {"model": model, "messages": messages, **greedy}

    def _text(self, tokens: int) -> str:
        return text_of(self._dice.choices(self._words, k=tokens))


def _tie_at(logprobs: list[dict[str, Any]], tie: float) -> int:
    """Position of the first token whose lead over the second best is below `tie`; else the end."""
    at = 0
    for entry in logprobs:
        best, second = (top["logprob"] for top in entry["top_logprobs"])
        if best - second < tie:
            break
        at += len(entry["token"])
    return at


@dataclass(slots=True)
class Clients:
    """Clients that chat until they are told to stop.

    Attributes:
        answers: all they got.
    """

    url: str
    talks: Talks
    dice: random.Random
    answers: list[Answer] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    async def run(self, count: int, stop: asyncio.Event) -> None:
        """Runs that many clients. Returns when each has its last answer."""
        transport = HttpTransport()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(count):
                    group.create_task(self._one(transport, stop))
        finally:
            await transport.aclose()

    async def _one(self, transport: HttpTransport, stop: asyncio.Event) -> None:
        while not stop.is_set():
            for right in self.talks.draw():
                await _pause(stop, self.dice.uniform(*THINKING_S))
                if stop.is_set():
                    return
                answer = await self._ask(transport, right)
                self.answers.append(answer)
                if answer.is_error:
                    break

    async def _ask(self, transport: HttpTransport, right: Right) -> Answer:
        answer = Answer(right.body["model"], time.monotonic())
        streams = self.dice.random() < 0.75
        leaves_after = self.dice.randint(1, 20) if streams and self.dice.random() < 0.15 else None
        is_slow = streams and self.dice.random() < 0.15
        body = right.body
        if streams:
            body = body | {"stream": True, "stream_options": {"include_usage": True}}
        name = f"chaos-{next(self._numbers)}"
        headers = Headers.of([("content-type", "application/json"), ("x-request-id", name)])
        url = f"{self.url}/v1/chat/completions"
        request = OutgoingRequest("POST", url, headers.raw, msgspec.json.encode(body))
        read = _Read()
        try:
            async with asyncio.timeout(HUNG_S):
                response = await transport.send(request)
            async with response:
                answer.status = response.status
                answer.engine = response.headers.get("x-kvpin-engine", "")
                if streams and response.status == 200:
                    await _read_stream(response, read, leaves_after, SLOW_READ_S if is_slow else 0.0)
                else:
                    async with asyncio.timeout(HUNG_S):
                        read.whole = await response.read()
        except EngineUnavailable as error:
            read.problem = str(error)
        except TimeoutError:
            answer.fate = "HUNG"
        answer.ended = time.monotonic()
        if not answer.fate:
            _judge(answer, read, right)
        answer.detail = f"{name}: {answer.detail}"
        return answer


async def _pause(stop: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        pass


@dataclass(slots=True)
class _Read:
    """An answer as it came.

    Attributes:
        whole: one that is no stream.
        chunks: of a stream.
        is_done: its end mark came.
        has_left: the client left.
        problem: how the connection ended, if not well.
        odd: an event that is no JSON.
    """

    whole: bytes | None = None
    chunks: list[dict[str, Any]] = field(default_factory=list)
    is_done: bool = False
    has_left: bool = False
    problem: str = ""
    odd: bytes = b""

    @property
    def text(self) -> str:
        """The text of the stream."""
        choices = [chunk["choices"][0] for chunk in self.chunks if chunk.get("choices")]
        return "".join(choice["delta"].get("content") or "" for choice in choices)

    @property
    def error(self) -> str:
        """The message of its error event, "" without one."""
        return next((chunk["error"]["message"] for chunk in self.chunks if "error" in chunk), "")

    @property
    def flaw(self) -> str:
        """The fault in the form of a complete stream, "" if there is none."""
        ends = sum(
            bool(chunk["choices"][0].get("finish_reason")) for chunk in self.chunks if chunk["choices"]
        )
        usages = sum(bool(chunk.get("usage")) for chunk in self.chunks)
        ids = len({(chunk["id"], chunk["model"]) for chunk in self.chunks})
        if self.odd:
            return f"an event that is no JSON: {self.odd[:80]!r}"
        return "" if ends == usages == ids == 1 else f"{ends} ends, {usages} usages, {ids} ids"


async def _read_stream(
    response: IncomingResponse, read: _Read, leaves_after: int | None, slow_s: float
) -> None:
    buffer = b""
    while True:
        async with asyncio.timeout(HUNG_S):
            piece = await response.receive()
        if not piece:
            return
        *events, buffer = (buffer + piece).split(b"\n\n")
        for event in events:
            _take(event, read)
        if leaves_after is not None and len(read.chunks) > leaves_after:
            read.has_left = True
            return
        if slow_s:
            await asyncio.sleep(slow_s)


def _take(event: bytes, read: _Read) -> None:
    if event == b"data: [DONE]":
        read.is_done = True
    elif event and not event.startswith(b":"):
        try:
            read.chunks.append(msgspec.json.decode(event.removeprefix(b"data: ")))
        except msgspec.DecodeError:
            read.odd = event


def _judge(answer: Answer, read: _Read, right: Right) -> None:
    """Says what became of a request."""
    if answer.status != 200:
        said = (read.whole or b"").decode(errors="replace")
        answer.fate = "refused" if answer.status else "BROKEN OFF"
        answer.detail = f"{answer.status} {said[:300]} {read.problem}"
    elif read.whole is not None:
        answer.detail, text = _text_of(read.whole)
        _compare(answer, text, right)
    elif read.is_done and not read.problem:
        answer.detail = read.flaw
        _compare(answer, read.text, right)
    else:
        answer.fate = "left" if read.has_left else "ended with an error event"
        answer.detail = (
            f"{read.error or read.problem}, after {len(read.text)} of {len(right.text)} characters"
        )
        if not read.error and not read.has_left:
            answer.fate = "BROKEN OFF"
        if not right.begins(read.text):
            answer.fate, answer.detail = (
                "WRONG",
                f"{answer.fate}, {answer.detail}: {_difference(read.text, right)}",
            )


def _text_of(whole: bytes) -> tuple[str, str]:
    """The fault in an answer without a stream, and its text."""
    try:
        return "", msgspec.json.decode(whole)["choices"][0]["message"]["content"]
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError):
        return f"no answer: {whole[:80]!r}", ""


def _compare(answer: Answer, text: str, right: Right) -> None:
    if answer.detail or not right.matches(text):
        answer.fate = "WRONG"
        answer.detail = answer.detail or _difference(text, right)
    else:
        answer.fate = "equal" if text == right.text else "near tie"


def _difference(text: str, right: Right) -> str:
    pairs = zip(text, right.text, strict=False)
    at = next((at for at, (one, two) in enumerate(pairs) if one != two), min(len(text), len(right.text)))
    lengths = f"{len(text)} and {len(right.text)} characters"
    return f"{lengths} differ at {at}: {text[at : at + 40]!r} instead of {right.text[at : at + 40]!r}"
