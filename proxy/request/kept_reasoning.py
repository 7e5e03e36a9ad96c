"""The reasoning of earlier answers, for clients that do not send it back: the rule `reasoning_kept`.

An engine's cache holds the reasoning of its answer. If the next prompt lacks it, all that follows is computed
again. kvpin has seen the answer, and puts its reasoning back; the chat template decides if it stays.

An answer is known by all that came before it and by what it says beside its reasoning. So the reasoning of
one conversation gets into no other, and a tenant gets only its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from typing import Any

import msgspec
from typing_extensions import override

from engine_adapter import UNREADABLE, JsonBody, decode_object
from engine_adapter.off_loop import JSON_BYTES_PER_MS, VALUES_PER_MS, off_loop
from proxy.errors import EngineFailed
from proxy.request.records import Sources
from proxy.request.stages import DONE, ERROR, Event, Stage
from proxy.request.translate.chats import Chat, read_chat

LIMIT_BYTES = 32 << 20
"""Reasoning that is kept, of all tenants together."""
OVERHEAD = 300
"""Bytes of memory that each takes beside its text, which may be one character."""
# Fields with the thoughts of a message; a client that sends one of them keeps its reasoning itself.
_THOUGHTS = ("reasoning_content", "reasoning")
# Fields beside the messages that a prompt is made of.
_BESIDE = ("tools", "functions", "documents", "chat_template_kwargs")
# Hashing a value takes so many times as long as looking at it.
_WORK_OF_A_VALUE = 8
Keep = Callable[[str, list[tuple[str, str, str]], str], None]
"""Takes what an answer says: its text, its calls (id, name, arguments), its reasoning."""


class KeptReasoning:
    """The reasoning of the last answers. At the limit, the tenant that has most loses what it used least
    recently."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._kept = Sources(limit_bytes, OVERHEAD)

    async def put_back(self, body: JsonBody, tenant: str | None) -> tuple[JsonBody, Keep | None]:
        """A chat with the reasoning that its client left out, and what keeps that of its answer; None for a
        chat whose answer cannot be known again."""
        ms = len(body.raw) / JSON_BYTES_PER_MS + _WORK_OF_A_VALUE * body.n_values / VALUES_PER_MS
        try:
            lacking, before = await off_loop(partial(_read, body), ms=ms)
        except UNREADABLE:  # whoever reads the chat next says so
            return body, None
        found: dict[int, bytes] = {}
        for index, key in lacking.items():
            if (reasoning := self._kept.raw(key, tenant)) is not None:
                self._kept.keep(key, tenant, reasoning)  # as the last that was used
                found[index] = reasoning
        if found:
            body = await off_loop(partial(_with_reasoning, body, found), ms=ms)

        def keep(text: str, calls: list[tuple[str, str, str]], reasoning: str) -> None:
            answer = before.copy()
            with suppress(*UNREADABLE):  # arguments that are nested too deeply
                answer.update(_identity("assistant", text, calls))
                self._kept.keep(answer.hexdigest(), tenant, reasoning.encode())

        return body, None if body.hint("n") not in (None, 1) else keep


class ReasoningSeen(Stage):
    """Reads the reasoning of a chat's answer on its way to the client."""

    def __init__(self, keep: Keep) -> None:
        """`keep` is called once, before the client has the end of the answer."""
        self._keep = keep
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: dict[int, list[str]] = {}

    @override
    def event(self, event: Event) -> Iterable[Event]:
        """Reads a whole answer, or a chunk of one; nothing is kept of what is none."""
        if self.marks is None and event.data and event.data != DONE:
            try:
                chat = event.read(read_chat)
            except EngineFailed:
                self.marks = ()
            else:
                self._take(chat)
        return (event,)

    def _take(self, chunk: Chat) -> None:
        for choice in chunk.choices[:1]:
            said = choice.delta or choice.message
            if said is not None:
                self._texts.append(said.content or "")
                self._thoughts.append(said.thoughts)
                for at, call in enumerate(said.tool_calls or ()):
                    known = self._calls.setdefault(at if call.index is None else call.index, ["", "", ""])
                    known[:] = [call.id or known[0], call.name or known[1], known[2] + call.arguments]
            if choice.finish_reason or choice.message is not None:
                self.marks = ()
                if self.status < ERROR and (thoughts := "".join(self._thoughts)):
                    calls = [(name, tool, given) for name, tool, given in self._calls.values()]
                    self._keep("".join(self._texts), calls, thoughts)


def _read(body: JsonBody) -> tuple[dict[int, str], blake2b]:
    """The keys of the assistant's messages without reasoning, by their numbers, and the hash of all messages.
    Reasoning does not count: whoever keeps some of it has the same keys. Raises one of `UNREADABLE`."""
    hashed = blake2b(digest_size=16)
    lacking: dict[int, str] = {}
    # Another model would not have thought that, and another salt is another user.
    hashed.update(_bytes(body.hint("model"), body.hint("cache_salt")))
    # So are others' documents, and other tools.
    hashed.update(_bytes(*({name: body.hint(name)} for name in _BESIDE if name in body)))
    for index, raw in enumerate(body.items("messages") or ()):
        message = msgspec.json.decode(raw)
        if not isinstance(message, dict):
            continue
        role = message.get("role")
        given = message.get("tool_calls")
        calls = [*map(_call, given)] if isinstance(given, list) else []
        hashed.update(_identity(role, message.get("content"), calls, message.get("tool_call_id")))
        if role == "assistant" and not any(message.get(name) for name in _THOUGHTS):
            lacking[index] = hashed.hexdigest()
    return lacking, hashed


def _with_reasoning(body: JsonBody, found: dict[int, bytes]) -> JsonBody:
    def with_it(raw: msgspec.Raw, reasoning: bytes) -> msgspec.Raw:
        fields = {**decode_object(raw), "reasoning_content": reasoning.decode()}
        return msgspec.Raw(msgspec.json.encode(fields))

    messages = enumerate(body.items("messages") or ())
    return body.replace(messages=[with_it(raw, found[at]) if at in found else raw for at, raw in messages])


def _call(call: Any) -> tuple[Any, Any, Any]:  # noqa: ANN401 - JSON
    match call:
        case {"function": dict(function)}:
            return call.get("id"), function.get("name"), function.get("arguments")
        case _:
            return None, None, None


def _identity(role: object, content: object, calls: list[tuple[Any, Any, Any]], of: object = None) -> bytes:
    """What a message says beside its reasoning. Clients write the same text and the same arguments anew in
    other forms."""
    if content is None:
        content = ""
    elif isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content):
        content = "".join(str(part["text"]) for part in content)
    said = content.strip() if isinstance(content, str) else content
    return _bytes(role, said, [(call_id, name, _parsed(given)) for call_id, name, given in calls], of)


def _bytes(*values: object) -> bytes:
    return repr(values).encode(errors="surrogatepass")


def _parsed(arguments: object) -> object:
    with suppress(*UNREADABLE):
        return msgspec.json.decode(arguments) if isinstance(arguments, str) else arguments
    return arguments
