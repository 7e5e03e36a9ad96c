"""The clients of `chaos.py`: their requests, and the check of each answer.

An answer is right if one engine of the model gives it as a whole. A mock's answer is a function of the prompt
and of the engine (`chaos_texts.py`). A text that begins with one engine's answer and ends with another's is
wrong, unless both answers are the same. The other engines answer greedily and alike: one of them is asked for
the right answers before the faults begin. A chat goes on with right answers.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, Protocol

import chaos_texts
import httpx
import msgspec
from chaos_apis import APIS, CHAT, Api, Read
from chaos_engines import EMBEDDED, LLAMA, MOCK
from migration import EMBEDDED_TIE, LLAMA_TIE
from router_work import text_of, tokenizer, words

from engine_adapter import EngineUnavailable, Headers, HttpTransport, OutgoingRequest

CHATS, TURNS = 12, 4
"""Chats with engines that have a model, and turns of every chat."""
SYSTEM_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 160, (20, 80), (16, 48)
HUNG_S = 180.0
"""A client that hears nothing for this long hangs."""
THINKING_S = (0.2, 3.0)
SLOW_READ_S = 0.3
PADDING = 10_000
"""Bytes that a slow client wants in each chunk, so that its socket is full."""
LONG_SHARE, SAMPLED_SHARE = 0.03, 0.1
"""Shares of the mocks' requests: longer than kvpin's time limit; sampled, so that no engine can continue."""
MOCK_TOKEN_S = 0.04
_TOO_LONG = "took longer than"
_TIES = {EMBEDDED: EMBEDDED_TIE, LLAMA: LLAMA_TIE}
_Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Whole:
    """The whole answer of one engine. `finish` and `tokens`: None where they are not known."""

    text: str
    finish: str | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Right:
    """A request and its right answers.

    Attributes:
        model, messages, fields: of the request.
        count: length of the longest answer.
        answers: the answer of each undisturbed engine.
        tie_at: the first position at which the two best tokens are so close that rounding decides.
        api: of the request.
        may_break: one of the engines never ends this answer as a stream.
        is_long: it takes longer than kvpin lets a request take.
    """

    model: str
    messages: list[_Message]
    count: int
    answers: tuple[Whole, ...]
    tie_at: int
    fields: dict[str, Any] = field(default_factory=lambda: {"temperature": 0})
    api: Api = CHAT
    may_break: bool = False
    is_long: bool = False

    @property
    def body(self) -> dict[str, Any]:
        """The request."""
        return {"model": self.model, **self.api.body(self.messages, self.count), **self.fields}

    def matches(self, text: str, finish: str, tokens: int) -> bool:
        """Returns whether this is the whole answer of one of the engines, up to the first near tie."""
        return any(
            _agrees(finish, each.finish) and _agrees(tokens, each.tokens) and self._is_same(text, each.text)
            for each in self.answers
        )

    def begins(self, text: str) -> bool:
        """Returns whether the text is a beginning of one of the right answers."""
        return any(each.text[: self.tie_at].startswith(text[: self.tie_at]) for each in self.answers)

    def _is_same(self, text: str, right: str) -> bool:
        return text == right or text[: self.tie_at] == right[: self.tie_at] != right


def _agrees(found: object, wanted: object) -> bool:
    return wanted is None or found == wanted


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
        return self.is_expectable or self.fate in {"BROKEN OFF", "WRONG", "HUNG"}

    @property
    def is_expectable(self) -> bool:
        """Returns whether a fault may have caused this error."""
        return self.fate in {"refused", "ended with an error event"}


class Talks:
    """Chats for all models."""

    def __init__(self, models: Sequence[str], mocks: int, long_s: float, dice: random.Random) -> None:
        """`mocks`: engines without a model. `long_s`: the time of such an engine's longest answers."""
        self._dice, self._mocks, self._long = dice, mocks, round(long_s / MOCK_TOKEN_S)
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
            asked = Right(model, messages, self._dice.randint(*ANSWER_TOKENS), (), 0)
            more = {"logprobs": True, "top_logprobs": 2, "cache_prompt": False}
            answer = await client.post(CHAT.path, json=asked.body | more)
            choice = answer.raise_for_status().json()["choices"][0]
            text = choice["message"]["content"]
            tie_at = _tie_at(choice["logprobs"]["content"], _TIES[model])
            chat.append(replace(asked, answers=(Whole(text),), tie_at=tie_at))
            messages = [*messages, {"role": "assistant", "content": text}]
        return chat

    def draw(self) -> Iterator[Right]:
        """The turns of a chat."""
        model = self._dice.choice(self._models)
        return iter(self._dice.choice(self._known[model])) if model in self._known else self._mock_chat()

    def _mock_chat(self) -> Iterator[Right]:
        messages = [{"role": "system", "content": self._dice.choice(self._systems)}]
        api = self._dice.choice((CHAT, CHAT, *APIS.values()))
        for _ in range(TURNS):
            messages = [*messages, self._question()]
            is_long = self._dice.random() < LONG_SHARE
            count = self._long if is_long else self._dice.randint(*ANSWER_TOKENS)
            prompt = tokenizer().chat(messages).token_ids
            told = [chaos_texts.told(prompt, count, engine) for engine in range(self._mocks)]
            answers = tuple(Whole(each.text, each.finish, len(each.pieces)) for each in told)
            temperature = 1 if self._dice.random() < SAMPLED_SHARE else 0
            stopper = chaos_texts.stopper(prompt, count)
            yield Right(
                MOCK,
                messages,
                count,
                answers,
                tie_at=max(len(each.text) for each in told) + 1,
                fields={"temperature": temperature},
                api=api,
                may_break=stopper is not None and stopper < self._mocks,
                is_long=is_long,
            )
            messages = [*messages, {"role": "assistant", "content": self._dice.choice(told).text}]

    def _question(self) -> _Message:
        return {"role": "user", "content": self._text(self._dice.randint(*QUESTION_TOKENS))}

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
        answer = Answer(right.model, time.monotonic())
        streams = self.dice.random() < 0.75
        leaves_after = self.dice.randint(1, 20) if streams and self.dice.random() < 0.15 else None
        is_slow = streams and self.dice.random() < 0.15
        body = right.body
        if streams:
            body["stream"] = True
            if right.api is CHAT:
                body["stream_options"] = {"include_usage": True}
                if is_slow and right.model == MOCK:
                    body["padding"] = PADDING
        name = f"chaos-{next(self._numbers)}"
        headers = [("content-type", "application/json"), ("x-request-id", name)]
        read = Read()
        opening = _Slow if is_slow else _Quick
        opened = opening(transport, f"{self.url}{right.api.path}", headers, msgspec.json.encode(body))
        try:
            async with asyncio.timeout(HUNG_S):
                response = await opened.__aenter__()
            try:
                answer.status, answer.engine = response.status, response.engine
                if streams and response.status == 200:
                    await _read_stream(response, read, right.api, leaves_after, is_slow=is_slow)
                else:
                    async with asyncio.timeout(HUNG_S):
                        read.whole = await response.read()
            finally:
                await opened.__aexit__(None, None, None)
        except (EngineUnavailable, httpx.TransportError) as error:
            read.problem = str(error) or type(error).__name__
        except TimeoutError:
            answer.fate = "HUNG"
        answer.ended = time.monotonic()
        if not answer.fate:
            _judge(answer, read, right)
        if _TOO_LONG in answer.detail and answer.is_expectable and (right.is_long or is_slow):
            answer.fate = "over the time limit"
        elif right.may_break and answer.fate == "ended with an error event":
            answer.fate = "no engine had the same text"
        answer.detail = f"{name} {right.api.path}: {answer.detail}"
        return answer


async def _pause(stop: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        pass


class _Response(Protocol):
    """An answer that is read."""

    status: int
    engine: str

    async def receive(self) -> bytes:
        """The next bytes; b"" at the end."""

    async def read(self) -> bytes:
        """All bytes."""


class _Quick:
    """A request of a client that reads what comes."""

    def __init__(
        self, transport: HttpTransport, url: str, headers: list[tuple[str, str]], body: bytes
    ) -> None:
        self._request = OutgoingRequest("POST", url, Headers.of(headers).raw, body)
        self._transport = transport

    async def __aenter__(self) -> _Response:
        response = await self._transport.send(self._request)
        self._response = await response.__aenter__()
        self.status, self.engine = response.status, response.headers.get("x-kvpin-engine", "")
        self.receive, self.read = response.receive, response.read
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._response.__aexit__(None, None, None)


class _Slow:
    """A request of a client whose socket is small, and full most of the time."""

    def __init__(
        self, _transport: HttpTransport, url: str, headers: list[tuple[str, str]], body: bytes
    ) -> None:
        small = (socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        self._client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(socket_options=[small], verify=False), timeout=HUNG_S
        )
        self._opening = self._client.stream("POST", url, headers=headers, content=body)

    async def __aenter__(self) -> _Response:
        response = await self._opening.__aenter__()
        self.status, self.engine = response.status_code, response.headers.get("x-kvpin-engine", "")
        self._chunks = response.aiter_raw()
        self.read = response.aread
        return self

    async def receive(self) -> bytes:
        """The next bytes; b"" at the end."""
        return await anext(self._chunks, b"")

    async def __aexit__(self, *error: object) -> None:
        await self._opening.__aexit__(None, None, None)
        await self._client.aclose()


async def _read_stream(
    response: _Response, read: Read, api: Api, leaves_after: int | None, *, is_slow: bool
) -> None:
    buffer = b""
    while True:
        async with asyncio.timeout(HUNG_S):
            piece = await response.receive()
        if not piece:
            if buffer.strip():
                read.odd = read.odd or b"half an event: " + buffer
            return
        *events, buffer = (buffer + piece).split(b"\n\n")
        for event in events:
            read.take(event, api)
        if leaves_after is not None and read.events > leaves_after:
            read.has_left = True
            return
        if is_slow:
            await asyncio.sleep(SLOW_READ_S)


def _judge(answer: Answer, read: Read, right: Right) -> None:
    """The fate of a request."""
    if answer.status != 200:
        said = (read.whole or b"").decode(errors="replace")
        answer.fate = "refused" if answer.status else "BROKEN OFF"
        answer.detail = f"{answer.status} {said[:300]} {read.problem}"
    elif read.whole is not None:
        answer.detail, said = _said(read.whole, right.api)
        _compare(answer, said, right)
    elif read.is_done and not read.problem:
        answer.detail = read.flaw
        said = (read.text, read.finishes[0], read.tokens[0]) if not answer.detail else (read.text, "", 0)
        _compare(answer, said, right)
    else:
        answer.fate = "left" if read.has_left else "ended with an error event"
        answer.detail = f"{read.error or read.problem}, after {len(read.text)} characters"
        if not read.error and not read.has_left:
            answer.fate = "BROKEN OFF"
        if not right.begins(read.text):
            flaw = _difference(read.text, right)
            answer.fate, answer.detail = "WRONG", f"{answer.fate}, {answer.detail}: {flaw}"
        elif read.is_done or (read.error and not read.problem and not read.has_left):
            answer.fate, answer.detail = "WRONG", f"a clean end after {answer.fate}, {answer.detail}"


def _said(whole: bytes, api: Api) -> tuple[str, tuple[str, str, int]]:
    """The fault in an answer without a stream, and what it says."""
    try:
        return "", api.said(msgspec.json.decode(whole))
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError):
        return f"no answer: {whole[:80]!r}", ("", "", 0)


def _compare(answer: Answer, said: tuple[str, str, int], right: Right) -> None:
    if answer.detail or not right.matches(*said):
        answer.fate = "WRONG"
        answer.detail = answer.detail or f"{said[1:]}, {_difference(said[0], right)}"
    else:
        answer.fate = "equal" if any(said[0] == each.text for each in right.answers) else "near tie"


def _difference(text: str, right: Right) -> str:
    """The difference between a text and the right answer that shares most with it."""
    at, best = max(((_common(text, each.text), each) for each in right.answers), key=itemgetter(0))
    lengths = f"{len(text)} and {len(best.text)} characters"
    found = f"{text[at : at + 40]!r} instead of {best.text[at : at + 40]!r}"
    return f"{lengths} differ at {at}: {found}, {best.finish}, {best.tokens} tokens"


def _common(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))
