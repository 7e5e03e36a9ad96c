"""Requests on their way to a slot: the prompt, the hold on one slot or all, and the body for the server."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial

from engine_adapter.body import JsonBody
from engine_adapter.hold import Hold, RequestBody
from engine_adapter.llama_server.answer_reader import SlotsAnswer, read_by
from engine_adapter.llama_server.mirror_events import MirrorEvents
from engine_adapter.llama_server.options import INFILL, NATIVE_COMPLETIONS, PINNED_ROUTES, SLOTS
from engine_adapter.llama_server.saved import salt_digest
from engine_adapter.llama_server.scheduler import SlotScheduler
from engine_adapter.llama_server.server_files import UNKNOWN_OWNER
from engine_adapter.llama_server.session import ServerSession
from engine_adapter.llama_server.turns import SlotRequest
from engine_adapter.off_loop import JSON_BYTES_PER_MS, VALUES_PER_MS, off_loop
from engine_adapter.types import KvTarget

_COMPLETIONS = "/v1/completions"
_TEXTS = NATIVE_COMPLETIONS | {_COMPLETIONS}
# Fields that turn one request into several; the server chooses their slots.
_SEVERAL = ("n", "n_cmpl")
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

# A prompt whose KV its tokens do not identify.
_UNKNOWN = SlotRequest(array("i"), UNKNOWN_OWNER)


def ask_of(prompt: KvTarget, mirror: MirrorEvents) -> SlotRequest:
    """A prompt that needs a slot. `mirror` learns its salt."""
    digest = salt_digest(prompt.cache_salt)
    mirror.know(digest, prompt.cache_salt)
    tokens = prompt.token_ids if prompt.token_ids is not None else array("i")
    return SlotRequest(tokens, digest, retention=prompt.retention, session=prompt.session)


def hold_request(
    session: ServerSession | None,
    mirror: MirrorEvents,
    path: str,
    body: RequestBody,
    prompt: KvTarget | None,
) -> AbstractAsyncContextManager[Hold]:
    """Holds what a request needs: a slot; all of them, if it becomes several; nothing, if none is managed.

    With a salt and without a slot of its owner's, it reuses nothing, and cannot name a slot.
    """
    if path == SLOTS:
        return nullcontext(Hold(body, answer=SlotsAnswer()))
    if not isinstance(body, JsonBody):
        return nullcontext(Hold(body))
    scheduler = session.scheduler if session is not None else None
    if session is None or scheduler is None or path not in PINNED_ROUTES:
        return nullcontext(Hold(_without_slot(body)))
    if _is_several(body):
        alone = _without_slot(body).replace(**{_CHUNK: 0})
        # Where the server chooses the slot, KV may lie that was moved, or is another prompt's (`is_sound`).
        may_reuse = scheduler.contents.rules.cuts_files and not session.facts.cache_reuse
        return _hold_all(scheduler, alone if may_reuse else alone.replace(cache_prompt=False))
    return _hold_slot(session, scheduler, mirror, path, body, prompt)


@asynccontextmanager
async def _hold_slot(
    session: ServerSession,
    scheduler: SlotScheduler,
    mirror: MirrorEvents,
    path: str,
    body: JsonBody,
    prompt: KvTarget | None,
) -> AsyncIterator[Hold]:
    is_known = prompt is not None and not any(body.get(name) for name in _OTHER_KV)
    ask = ask_of(prompt, mirror) if prompt is not None and is_known else _UNKNOWN
    if path == INFILL and not body.get("lora"):
        ms = len(body.raw) / JSON_BYTES_PER_MS + body.n_values / VALUES_PER_MS
        text = await off_loop(partial(_text_around, body), ms=ms)
        ask = replace(ask_of(KvTarget(cache_salt=body.get("cache_salt")), mirror), text=text)
    # The server's own prompt cache serves every tenant.
    may_share = session.facts.keeps_none_itself or ask.salt is None
    wants_reuse = body.get("cache_prompt") is not False
    reuse = ask is not _UNKNOWN and wants_reuse and may_share
    ask = replace(ask, reuse=reuse, is_chat=path not in _TEXTS and path != INFILL)
    async with scheduler.lease(ask) as lease:
        lease.shows_text = _shows_text(path, session.facts.chat_template, body)
        reuses = lease.may_reuse
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
            retains=ask.retention is not None
            and ask.retention.priority > 0
            and scheduler.contents.can_restore,
        )


@asynccontextmanager
async def _hold_all(scheduler: SlotScheduler, body: JsonBody) -> AsyncIterator[Hold]:
    """Runs a request alone, because the server chooses its slots. Nothing is predicted for it."""
    async with scheduler.alone():
        yield Hold(body, cached_tokens=0, firm=False, note="unpinned: it ran alone on all slots")


def _without_slot(body: JsonBody) -> JsonBody:
    """A request that runs on any slot. Whose KV lies there is not known: with a salt, it reuses none."""
    return body if body.get("cache_salt") is None else body.replace(cache_prompt=False, id_slot=None)


def _ids_for_text(path: str, body: JsonBody, prompt: KvTarget | None) -> dict[str, object]:
    """The text of a completion as token ids, so that the server need not tokenise it again.

    A chat stays as it is: the server makes its prompt from the messages, whatever else comes with them.
    """
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


def _is_several(body: JsonBody) -> bool:
    """True if the server turns it into several requests. A list with a number in it is one prompt."""
    prompt = body.get("prompt")
    texts = isinstance(prompt, list) and not any(isinstance(token, int) for token in prompt)
    return (texts and len(prompt) > 1) or any(body.get(name) not in (None, 1) for name in _SEVERAL)


def _shows_text(path: str, template: str, body: JsonBody) -> bool:
    """True if the stream of an answer shows all text that is sampled, as it is sampled.

    Stop strings hold text back. The chat parser drops white space before an answer when the template knows
    reasoning, or when the answer is parsed.
    """
    if body.get("stop"):
        return False
    return path == _COMPLETIONS or not ("think" in template or any(body.get(name) for name in _PARSED))
