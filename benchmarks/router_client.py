"""Sends a workload at fixed times, whatever comes back, and times the first token of each answer. Times count
from the moment the request was due, so they include this client's own delay."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
from router_work import Question, text_of
from typing_extensions import override

from engine_adapter import EngineUnavailable, Headers, HttpTransport, IncomingResponse, OutgoingRequest
from engine_adapter.http import client
from engine_adapter.http.connection import Connection

CHAT = "/v1/chat/completions"
# An answer that takes longer has failed.
TIMEOUT_S = 120


class Acknowledging(Connection):
    """A connection that acknowledges at once what it has read, as clients of another machine mostly do.

    sglang-router and Dynamo leave Nagle's algorithm on: what follows the head of an answer waits for the
    client's acknowledgement. Linux delays that by 40 ms on connections that are used by turns.
    """

    __slots__ = ()

    @override
    def data_received(self, data: bytes) -> None:
        connected = self._transport.get_extra_info("socket")
        if connected.family != socket.AF_UNIX:  # tests import this module beside others
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        super().data_received(data)


client.Connection = Acknowledging  # type: ignore[misc,attr-defined]  # this process is a client and no proxy


@dataclass(slots=True)
class Answer:
    """The outcome of one request.

    Attributes:
        sent_late_s: seconds from its due time until it was sent.
        first_token_s: seconds from its due time to the first text; None without any.
        prompt_tokens, cached_tokens: as the engine reported them.
        error: what went wrong, "" for nothing.
        engine, predicted: as kvpin said: where it went, and the cached tokens it would find there.
    """

    sent_late_s: float = 0.0
    first_token_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""
    engine: str = ""
    predicted: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    prompt_tokens_details: dict[str, int | None] | None = None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


_EVENT = msgspec.json.Decoder(_Event)


async def play(urls: Sequence[str], work: Sequence[Question], session_header: str | None) -> list[Answer]:
    """Plays the workload; request n goes to the address n modulo their number.

    Args:
        urls: one of a router, or those of engines.
        work: by arrival.
        session_header: the header for the session; None to send none.
    """
    async with aclosing(HttpTransport()) as client:
        start = time.monotonic() + 0.5
        tasks = []
        for number, question in enumerate(work):
            headers = [("content-type", "application/json")]
            if session_header is not None:
                headers.append((session_header, question.session))
            await asyncio.sleep(max(0.0, start + question.at - time.monotonic()))
            url = f"{urls[number % len(urls)]}{CHAT}"
            tasks.append(
                asyncio.create_task(ask(client, url, Headers.of(headers), question, start + question.at))
            )
        return await asyncio.gather(*tasks)


async def ask(client: HttpTransport, url: str, headers: Headers, question: Question, due: float) -> Answer:
    """Sends a question that was due at `due`, by the monotonic clock, and reads its answer."""
    answer = Answer()
    request = OutgoingRequest("POST", url, headers.raw, question.body)
    answer.sent_late_s = time.monotonic() - due
    try:
        async with asyncio.timeout(TIMEOUT_S), await client.send(request) as response:
            if response.status != 200:
                said = (await response.read())[:200]
                answer.error = f"status {response.status}: {said.decode(errors='replace')}"
                return answer
            answer.engine = response.headers.get("x-kvpin-engine", "")
            predicted = response.headers.get("x-kvpin-predicted-tokens")
            answer.predicted = None if predicted is None else int(predicted)
            text = await _read(response, answer, due)
    except (EngineUnavailable, TimeoutError, msgspec.DecodeError) as error:
        answer.error = f"{type(error).__name__}: {error}"
        return answer
    if text != text_of(question.answer):
        answer.error = f"answered with {len(text)} characters other than the engine's"
    return answer


async def _read(response: IncomingResponse, answer: Answer, due: float) -> str:
    """The whole text."""
    text: list[str] = []
    rest = b""
    while piece := await response.receive():
        *events, rest = (rest + piece).split(b"\n\n")
        for raw in events:
            data = raw.removeprefix(b"data:").strip()
            if not data or data == b"[DONE]":
                continue
            event = _EVENT.decode(data)
            if event.choices and event.choices[0].delta.content:
                if answer.first_token_s is None:
                    answer.first_token_s = time.monotonic() - due
                text.append(event.choices[0].delta.content)
            if event.usage is not None:
                answer.prompt_tokens = event.usage.prompt_tokens
                details = event.usage.prompt_tokens_details or {}
                answer.cached_tokens = details.get("cached_tokens") or 0
    return "".join(text)
