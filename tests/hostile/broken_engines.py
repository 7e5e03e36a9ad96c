"""Engines that answer what no engine should. What a chat's message says, the broken engine does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from tests.hostile.attacker import MIB, SERVED, Attack, Attacker, Run
from tests.hostile.client import CHAT, chat, post
from tests.hostile.engine_texts import BROKEN_HEADS, SECRET
from tests.hostile.place import BAD, BROKEN

_CUT = frozenset({200, 502})
_PAGE_HEADERS = ("clear-site-data:", "refresh:", "strict-transport-security:", "\nlocation:")
_FORGED = ("forged", "x-kvpin-cached-tokens: 9")


def _answers(names: Iterable[str], mib: int = 1, count: int = 1, *, stream: bool = False) -> Run:
    """Asks for answers of about `mib` MiB, `count` of each at once. No text of theirs may come in a head, and
    none at all where kvpin answers itself."""

    async def run(a: Attacker) -> None:
        for name in names:
            body = chat(BROKEN, f"{name}:{a.size(mib) // MIB}", stream=stream, temperature=0)
            request = post(CHAT, body, key=BAD)
            for answer in await asyncio.gather(*(a.ask(request) for _ in range(count))):
                if SECRET.encode() in (answer.raw if answer.status == 502 else answer.head.encode()):
                    a.fault(f"the engine's text in {answer.status} for {name}")

    return run


async def _done_in_the_text(a: Attacker) -> None:
    answer = await a.ask(post(CHAT, chat(BROKEN, "[DONE] in the text", stream=True), key=BAD))
    if b'"error"' not in answer.raw and answer.is_whole:
        a.fault("a stream that stopped without its [DONE] counts as whole")


def _without(name: str, headers: Iterable[str]) -> Run:
    """Asks for an answer with headers that must not reach the client."""

    async def run(a: Attacker) -> None:
        answer = await a.ask(post(CHAT, chat(BROKEN, name), key=BAD))
        for header in headers:
            if header in answer.head:
                a.fault(f"{header.strip()!r} of an engine reached the client")

    return run


ATTACKS = (
    Attack("an engine echoes prompts in errors", frozenset({500, 502}),
           _answers(["echo in an error"], 30, 3)),
    Attack("an event without end", _CUT, _answers(["an event without end"], 400, 2, stream=True)),
    Attack("[DONE] in a text that stops", _CUT, _done_in_the_text),
    Attack("headers for browsers", SERVED, _without("headers for browsers", _PAGE_HEADERS)),
    Attack("broken heads of answers", frozenset({502}), _answers(BROKEN_HEADS)),
    Attack("an answer without end", _CUT, _answers(["an answer without end"], 600)),
    Attack("a bomb as an answer", SERVED, _answers(["a bomb"], 60)),
    Attack("a deep answer", _CUT, _answers(["deep JSON"], 60)),
    Attack("odd usage", SERVED, _answers(["odd usage"])),
    Attack("forged headers", SERVED, _without("forged headers", _FORGED)),
    Attack("millions of events", SERVED, _answers(["many events"], 120, 2, stream=True)),
)  # fmt: skip
