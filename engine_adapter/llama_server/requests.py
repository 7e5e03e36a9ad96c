"""Requests on their way to a slot, and their answers on the way back.

The prompt, the hold on a slot, the body for the server, and the reader of its answer.

The server's own completions are not sent as streams: the server notices within about a second that their
client has left, and their JSON answer has more than their stream. It can tell the ids of all sampled tokens:
kvpin asks for them, and removes them from the answer if the client did not ask.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any

import msgspec
from typing_extensions import override

from engine_adapter.body import UNREADABLE, JsonBody
from engine_adapter.errors import EngineRejected, EngineUnavailable
from engine_adapter.hold import AnswerReader, Hold, RequestBody
from engine_adapter.llama_server.answer import CHAT, COMPLETIONS, CompletionOutput, read_answer
from engine_adapter.llama_server.mirror_events import MirrorEvents
from engine_adapter.llama_server.options import INFILL, NATIVE_COMPLETIONS, PINNED_ROUTES, SLOTS
from engine_adapter.llama_server.saved import salt_digest
from engine_adapter.llama_server.scheduler import SlotLease, SlotRequest, SlotScheduler
from engine_adapter.llama_server.server_files import UNKNOWN_OWNER
from engine_adapter.llama_server.session import ServerSession
from engine_adapter.off_loop import JSON_BYTES_PER_MS, VALUES_PER_MS, off_loop
from engine_adapter.types import KvTarget

_TEXTS = NATIVE_COMPLETIONS | {COMPLETIONS}
# Fields that turn one request into several, for which the server would choose the slots. kvpin splits those
# before. What is left contradicts itself: `n` of 1 and `n_cmpl` of 2.
_SEVERAL = ("n", "n_cmpl")
_TOO_MANY = "kvpin gives llama-server one prompt and one answer at a time: send a request for each"
# Fields that make the server parse an answer instead of passing on its text.
_PARSED = ("tools", "response_format", "json_schema", "grammar")
# Fields that change the KV of a prompt: its tokens alone do not identify it.
_OTHER_KV = ("lora",)

# The least run of equal tokens that the server moves from further on in its slot. There, their KV gives other
# answers, also to the requests after. So the engine's owner decides (`cache_reuse`), and neither a client's
# field nor the server's `--cache-reuse`.
_CHUNK = "n_cache_reuse"
_MOVED = "not exact: it may use KV that was moved, as the engine's cache_reuse allows"

# Characters by which texts to fill in are told apart.
_TEXT_LOOKED_AT = 65_536

_UNPARSED = "llama-server could not parse the whole answer: its end is missing"
# Longer answers are passed on unread: the server is asked what they left in the slot.
MAX_BYTES = 64 * 2**20
# Of a stream, so many are read in about 1 ms.
_BYTES_PER_MS = 8192
# The fields of `GET /slots` that show the last request on a slot.
_OF_A_REQUEST = ("prompt", "generated", "params")

# A prompt whose KV its tokens do not identify.
_UNKNOWN = SlotRequest(array("i"), UNKNOWN_OWNER)


def ask_of(prompt: KvTarget, mirror: MirrorEvents) -> SlotRequest:
    """A prompt that needs a slot. `mirror` learns its salt."""
    digest = salt_digest(prompt.cache_salt)
    mirror.know(digest, prompt.cache_salt)
    tokens = prompt.token_ids if prompt.token_ids is not None else array("i")
    return SlotRequest(tokens, digest, retention=prompt.retention, session=prompt.session)


def hold_request(
    session: ServerSession | None, path: str, body: RequestBody, prompt: KvTarget | None
) -> AbstractAsyncContextManager[Hold]:
    """Holds the slot that a request needs; nothing, if none is managed. With a salt and without a slot of its
    owner's, it reuses nothing, and cannot name a slot."""
    if path == SLOTS:
        return nullcontext(Hold(body, answer=SlotsAnswer()))
    if not isinstance(body, JsonBody):
        return nullcontext(Hold(body))
    scheduler = session.scheduler if session is not None else None
    if session is None or scheduler is None or path not in PINNED_ROUTES:
        # Whose KV lies on the slot that it gets is not known: with a salt, it reuses none.
        has_salt = body.get("cache_salt") is not None
        return nullcontext(Hold(body.replace(cache_prompt=False, id_slot=None) if has_salt else body))
    if _is_several(path, body):
        raise EngineRejected(_TOO_MANY, status=HTTPStatus.BAD_REQUEST)
    return _hold_slot(session, scheduler, path, body, prompt)


@asynccontextmanager
async def _hold_slot(
    session: ServerSession, scheduler: SlotScheduler, path: str, body: JsonBody, prompt: KvTarget | None
) -> AsyncIterator[Hold]:
    is_known = prompt is not None and not any(body.get(name) for name in _OTHER_KV)
    ask = ask_of(prompt, session.mirror) if prompt is not None and is_known else _UNKNOWN
    if path == INFILL and not body.get("lora"):
        ms = len(body.raw) / JSON_BYTES_PER_MS + body.n_values / VALUES_PER_MS
        target = KvTarget(cache_salt=body.get("cache_salt"))
        text = await off_loop(partial(_text_around, body), ms=ms)
        ask = replace(ask_of(target, session.mirror), text=text)
    # The server's own prompt cache serves every tenant.
    may_share = session.facts.keeps_none_itself or ask.salt is None
    reuse = ask is not _UNKNOWN and body.get("cache_prompt") is not False and may_share
    ask = replace(ask, reuse=reuse, is_chat=path not in _TEXTS and path != INFILL)
    async with scheduler.lease(ask) as lease:
        lease.shows_text = _shows_text(path, session.facts.chat_template, body)
        reuses, retains = lease.may_reuse, ask.retention is not None and ask.retention.priority > 0
        sent, answer = read_by(path, body, lease)
        slot = {"id_slot": lease.slot, "cache_prompt": reuses, _CHUNK: lease.memory.rules.chunk}
        yield Hold(
            sent.replace(**slot, **_ids_for_text(path, body, prompt)),
            cached_tokens=lease.cached_tokens if reuses else 0,
            firm=not reuses or (is_known and lease.firm and session.facts.keeps_none_itself),
            answer=answer,
            note="" if lease.is_exact else _MOVED,
            slot=lease.slot,
            is_lost=lambda: scheduler.is_closed,
            retains=retains and scheduler.contents.can_restore,
        )


def _ids_for_text(path: str, body: JsonBody, prompt: KvTarget | None) -> dict[str, object]:
    """The text of a completion as token ids, so that the server need not tokenise it again. A chat stays as
    it is: the server makes its prompt from the messages, whatever else comes with them."""
    is_text = path in _TEXTS and isinstance(body.get("prompt"), str)
    if not is_text or prompt is None or not prompt.exact or not prompt.token_ids:
        return {}
    return {"prompt": prompt.token_ids.tolist()}


def _text_around(body: JsonBody) -> array[int]:
    """How the text begins that `/infill` makes a prompt of, as code points."""
    extra = body.get("input_extra")
    parts = [each.get("text") for each in extra if isinstance(each, dict)] if isinstance(extra, list) else []
    text = "".join(each for each in (*parts, body.get("input_prefix")) if isinstance(each, str))
    return array("i", text[:_TEXT_LOOKED_AT].encode("utf-32-le", "surrogatepass"))


def _is_several(path: str, body: JsonBody) -> bool:
    """True if the server would turn it into several requests. A list with a number in it is one prompt."""
    prompt: Any = body.get("prompt") if path != INFILL else None
    texts = isinstance(prompt, list) and not any(isinstance(token, int) for token in prompt)
    return (texts and len(prompt) > 1) or any(body.get(name) not in (None, 1) for name in _SEVERAL)


def _shows_text(path: str, template: str, body: JsonBody) -> bool:
    """True if the stream of an answer shows all text that is sampled, as it is sampled. Stop strings hold
    text back. The chat parser drops white space before an answer when the template knows reasoning, or when
    the answer is parsed."""
    if body.get("stop"):
        return False
    return path == COMPLETIONS or not ("think" in template or any(body.get(name) for name in _PARSED))


# --- answers --------------------------------------------------------------------------------------------


def streaming_body(path: str, body: JsonBody) -> JsonBody | None:
    """The request as a stream with usage; None if it streams already, or cannot."""
    if path not in (CHAT, COMPLETIONS) or body.get("stream") is True:
        return None
    if path == CHAT and body.get("logprobs") and body.get("tools"):
        return None  # the server refuses this as a stream, and answers it otherwise
    return body.replace(stream=True, stream_options={"include_usage": True})


def read_by(path: str, body: JsonBody, lease: SlotLease) -> tuple[JsonBody, AnswerReader]:
    """The body for the server, and the reader of its answer."""
    if path in (*NATIVE_COMPLETIONS, INFILL) and body.get("stream") is not True:
        # A client that chooses the fields of its answer gets no other.
        hides_tokens = body.get("return_tokens") is not True and not body.get("response_fields")
        asked = body.replace(return_tokens=True) if hides_tokens else body
        return asked, NativeAnswer(lease, hides_tokens=hides_tokens)
    streamed = streaming_body(path, body)
    return streamed or body, SlotAnswer(path, lease, assembles=streamed is not None)


class SlotAnswer(AnswerReader):
    """`AnswerReader` of a request on a leased slot. Reads the answer once, when it is over."""

    takes_pieces = True

    def __init__(self, path: str, lease: SlotLease, *, assembles: bool) -> None:
        self.assembles = assembles
        self._path = path
        self._lease = lease
        self._chunks: list[bytes] = []
        self._size = 0

    @property
    @override
    def finish_ms(self) -> float:
        return self._size / _BYTES_PER_MS

    @override
    def feed(self, chunk: bytes) -> bytes:
        self._lease.has_begun = True
        self._size += len(chunk)
        if self._size <= MAX_BYTES or self.assembles:
            self._chunks.append(chunk)
        return b"" if self.assembles else chunk

    @override
    def finish(self, rest: bytes = b"") -> bytes:
        if self._size > MAX_BYTES and not self.assembles:
            self._chunks.clear()
            return rest
        answer = self._lease.answer = read_answer(b"".join(self._chunks))
        self._chunks.clear()
        if not self.assembles:
            return rest
        whole = answer.assembled(self._path)
        if answer.failure is not None:
            self.note = _UNPARSED  # any other error is raised
        return whole

    @override
    def cached_tokens(self) -> int | None:
        return self._lease.answer.cached_tokens if self._lease.answer is not None else None


class NativeAnswer(SlotAnswer):
    """`AnswerReader` of a completion that the server answers with one JSON object."""

    def __init__(self, lease: SlotLease, *, hides_tokens: bool) -> None:
        """`hides_tokens`: the client did not ask for token ids."""
        super().__init__("", lease, assembles=False)
        self._hides_tokens = hides_tokens

    @override
    def feed(self, chunk: bytes) -> bytes:
        self._lease.has_begun = True
        answer = self._lease.answer = CompletionOutput()
        answer.read(chunk)
        return _without_token_ids(chunk) if self._hides_tokens else chunk

    @override
    def finish(self, rest: bytes = b"") -> bytes:
        return rest


class SlotsAnswer(AnswerReader):
    """`AnswerReader` of `GET /slots`. Removes prompts, answers and parameters: they may be anybody's."""

    @override
    def feed(self, chunk: bytes) -> bytes:
        if not chunk:  # the answer to HEAD
            return chunk
        try:
            slots = msgspec.json.decode(chunk, type=list[dict[str, Any]])
        except UNREADABLE as error:
            raise EngineUnavailable(f"GET /slots: not a list of slots: {error}") from error
        for slot in slots:
            for name in _OF_A_REQUEST:
                slot.pop(name, None)
        return msgspec.json.encode(slots)


def _without_token_ids(content: bytes) -> bytes:
    """An answer as the server writes it when nobody asks for token ids. All other bytes stay."""
    try:
        answer = JsonBody(content)
    except UNREADABLE:
        return content
    return answer.replace(tokens=[]).raw if "tokens" in answer else content
