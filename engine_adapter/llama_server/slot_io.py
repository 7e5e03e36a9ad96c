"""kvpin's calls of a llama-server for a request: the routes of its slots, and the token ids of a prompt."""

from __future__ import annotations

import asyncio
import re
from array import array
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, TypeVar

import msgspec

from engine_adapter.body import JsonBody
from engine_adapter.errors import EngineError, EngineLost, EngineRejected, EngineUnreachable
from engine_adapter.http.control import ANSWER_S, ControlClient
from engine_adapter.llama_server.options import NATIVE_COMPLETIONS
from engine_adapter.types import TokenIds, common_prefix

# --- the routes of the slots: what they hold, save, restore, erase, and when they are quiet -------------
# Each call raises EngineUnavailable when no answer comes, or one of another form, and EngineRejected for an
# error.

# Tens of gigabytes to a slow disk take minutes. A server that dies meanwhile is noticed by its health.
MOVE_S = 1800.0
# Seconds after which a save or restore without an answer is looked after, and in which an answer comes once
# the server is done.
LOOK_S, LATE_S = 5.0, 2.0
# Pauses between looks at a slot whose client left: the server notices that only after an idle second.
_POLL_S = (0.02, 0.15, 1.2)
# A question that changes nothing, and waits in the same queue as requests.
_ADAPTERS = "/lora-adapters"
# Time from the last byte of a request to its place in the server's queue.
_ARRIVAL_S = 0.02
_ASK_S = 3.0
_Told = TypeVar("_Told")


class _Params(msgspec.Struct, frozen=True):
    """Of the parameters of a request: who proposes tokens. Older servers have draft models alone."""

    drafters: str = msgspec.field(name="speculative.types", default="draft")


class SlotState(msgspec.Struct, frozen=True):
    """One slot as `GET /slots` shows it."""

    id: int
    n_ctx: int
    is_processing: bool
    id_task: int | None = None  # number of its latest request, None when it had none
    # Tokens it holds; None if it had no request, even after a restore.
    n_tokens: int | None = msgspec.field(name="n_prompt_tokens", default=None)
    speculative: bool = False  # a draft model proposes tokens, or text that came before does
    params: _Params | None = None  # of its latest request

    @property
    def has_draft(self) -> bool | None:
        """True if a draft model proposes tokens; None before its first request, which tells."""
        if self.speculative and self.params is None:
            return None
        return self.speculative and self.params is not None and "draft" in self.params.drafters


_Slots = Annotated[list[SlotState], msgspec.Meta(min_length=1)]


class _SaveTime(msgspec.Struct):
    save_ms: float


class _Saved(msgspec.Struct):
    n_saved: int
    n_written: int
    timings: _SaveTime


class _RestoreTime(msgspec.Struct):
    restore_ms: float


class _Restored(msgspec.Struct):
    n_restored: int
    n_read: int
    timings: _RestoreTime


class _Erased(msgspec.Struct):
    n_erased: int


_Answer = TypeVar("_Answer", _Saved, _Restored, _Erased)


@dataclass(frozen=True, slots=True)
class Moved:
    """The size of a save or restore: tokens, bytes, and the seconds in which the server did nothing else."""

    tokens: int
    size: int
    seconds: float


async def save(control: ControlClient, slot_id: int, name: str) -> Moved:
    """Writes a slot to file `name` of the server's save path."""
    answer = await _act(control, slot_id, "save", _Saved, {"filename": name})
    return Moved(answer.n_saved, answer.n_written, answer.timings.save_ms / 1000)


async def restore(control: ControlClient, slot_id: int, name: str) -> Moved:
    """Replaces a slot's content with file `name`. If that is rejected, the slot is empty."""
    answer = await _act(control, slot_id, "restore", _Restored, {"filename": name})
    return Moved(answer.n_restored, answer.n_read, answer.timings.restore_ms / 1000)


async def erase(control: ControlClient, slot_id: int) -> None:
    """Empties a slot."""
    await _act(control, slot_id, "erase", _Erased, {})


async def _act(
    control: ControlClient, slot_id: int, action: str, kind: type[_Answer], fields: dict[str, str]
) -> _Answer:
    """Lets the server do something with a slot. A connection can be half-open: the answer never comes. Raises
    EngineLost if the server is done with all that it was sent, and did not answer; or if it ends."""
    path = f"/slots/{slot_id}?action={action}"
    answer = asyncio.ensure_future(control.read(kind, "POST", path, json=fields, answer_s=MOVE_S))
    try:
        while not (await asyncio.wait({answer}, timeout=LOOK_S))[0]:
            if await _is_done(control, slot_id) and not (await asyncio.wait({answer}, timeout=LATE_S))[0]:
                raise EngineLost(f"slot {slot_id}: the answer to {action!r} was lost")
        return answer.result()
    finally:
        answer.cancel()


async def _is_done(control: ControlClient, slot_id: int) -> bool:
    """True if the server has done all that it was sent for a slot before this question. Operations on a slot
    that works for somebody else wait, and questions overtake them. Raises EngineLost if the server ends: it
    takes no more connections, answers nothing that waits in its queue, and does not end while somebody waits
    (llama.cpp 0c1e570)."""
    try:
        await _between_steps(partial(control.get, _ADAPTERS))
        return not (await read_slots(control))[slot_id].is_processing
    except EngineUnreachable as error:
        raise EngineLost(f"slot {slot_id}: the server ends") from error
    except (EngineError, IndexError):
        return False


class Pulse(msgspec.Struct, frozen=True):
    """The process that answers, and whether it sleeps; of a router, how many models it runs, and whether it
    loads those that requests name. Asking is always possible."""

    instance: str | None = msgspec.field(name="media_marker", default=None)
    is_sleeping: bool = False
    role: str = ""
    max_instances: int = 0
    models_autoload: bool = True


async def read_pulse(control: ControlClient) -> Pulse:
    """Asks without waking the server or keeping it awake."""
    return await control.read(Pulse, "GET", "/props")


async def read_slots(control: ControlClient) -> list[SlotState]:
    """All slots by id, at least one. Wakes a sleeping server: ask `read_pulse` first."""
    slots = await _between_steps(partial(control.read, _Slots, "GET", "/slots"))
    return sorted(slots, key=lambda slot: slot.id)


async def _between_steps(ask: Callable[[], Awaitable[_Told]]) -> _Told:
    """The answer to a question that waits for the server's steps. One that is about to end never gives it,
    and does not end while somebody waits (llama.cpp 0c1e570): so kvpin asks anew."""
    for _ in range(int(ANSWER_S / _ASK_S) - 1):
        with suppress(TimeoutError):
            async with asyncio.timeout(_ASK_S):
                return await ask()
    return await ask()


async def read_adapters(control: ControlClient) -> list[Any]:
    """The server's LoRA adapters, each with its scale. A server that began without any gets none."""
    return await _between_steps(partial(control.read_optional, list[Any], _ADAPTERS)) or []


def spare_slot(slots: Sequence[SlotState]) -> int:
    """The slot whose content is cheapest to lose: an idle one if possible, with the fewest tokens."""
    return min(slots, key=lambda slot: (slot.is_processing, slot.n_tokens or 0, slot.id)).id


async def when_idle(control: ControlClient, slot_id: int) -> SlotState:
    """Waits until the server no longer works on a slot; returns its state."""
    pauses = iter(_POLL_S)
    while True:
        state = (await read_slots(control))[slot_id]
        if not state.is_processing:
            return state
        await asyncio.sleep(next(pauses, _POLL_S[-1]))


async def until_all_arrived(control: ControlClient) -> None:
    """Waits until every request sent so far runs or is gone. One whose client left may still wait behind a
    long step and then start. During the step, the server answers `/slots` and does not show the request."""
    await asyncio.sleep(_ARRIVAL_S)
    with suppress(EngineRejected):  # a server without this route
        await _between_steps(partial(control.get, _ADAPTERS))


async def end_copies(control: ControlClient, slot_id: int) -> None:
    """Computes one token on a slot without useful KV.

    A request for several answers copies KV between slots. If it ends without a further step, the copies stay
    pending. The next step of any slot then makes them, even over KV that was restored meanwhile, and answers
    are wrong (observed on llama.cpp 0c1e570). Erasing the slot does not help, a step does.
    """
    body = {"prompt": [0], "n_predict": 0, "id_slot": slot_id, "cache_prompt": False}
    await control.call("POST", "/completion", json=body)


# --- the token ids of a request, from the server that will compute it: exact for any template and flags ---
# A chat costs two calls (`/apply-template`, `/tokenize`), a text one call, ready ids none.

_CHAT = "/v1/chat/completions"
_COMPLETIONS = NATIVE_COMPLETIONS | {"/v1/completions"}
_INT32_MAX = 2**31 - 1
# The end of the message before.
_END_MARKER = re.compile(r"^(\s*<[^<>]*(end|close)[^<>]*>)+", re.IGNORECASE)


class _Prompt(msgspec.Struct):
    prompt: str


class _Tokens(msgspec.Struct):
    tokens: list[int]


async def tokenize(control: ControlClient, path: str, body: JsonBody) -> TokenIds[int]:
    """The ids of a request to `path`: OpenAI's chats or completions, or the server's completions.

    The server gets the whole chat body, because more than its messages makes the prompt: tools,
    `tool_choice`, `response_format`, `reasoning_effort`, `chat_template_kwargs`, a message to continue.
    Raises EngineRejected for what is no prompt, or one whose ids do not identify it (images, sound).
    """
    if path == _CHAT:
        _check_all_text(body.get("messages"))
        rendered = await control.read(_Prompt, "POST", "/apply-template", content=body.raw)
        return await _tokens(control, rendered.prompt)
    if path not in _COMPLETIONS:
        raise _rejected(f"kvpin does not follow prompts of {path}", "path")
    tokens: TokenIds[int] = array("i")
    for index, part in enumerate(_parts(body.get("prompt"))):
        if isinstance(part, str):
            tokens += await _tokens(control, part, add_special=index == 0)
        else:
            tokens.append(part)
    return tokens


async def read_user_mark(control: ControlClient) -> tuple[int, ...]:
    """The tokens that begin a user message, as the server finds them in its chat template: it compares two
    chats, of which one has a further user message. Empty if the template does not tell."""
    user, begun = {"role": "user", "content": "kvpin-a"}, [{"role": "user", "content": "kvpin-b"}]
    begun.append({"role": "assistant", "content": "kvpin-c"})
    try:
        try:
            texts = [await _rendered(control, messages) for messages in ([], [user])]
        except EngineRejected:  # the template takes no empty chat
            texts = [await _rendered(control, messages) for messages in (begun, [*begun, user])]
        added = texts[1][common_prefix(*texts) :].rpartition(begun[-1]["content"])[2]
        mark = _END_MARKER.sub("", added.partition(user["content"])[0]).strip()
        return tuple(await _tokens(control, mark, add_special=False)) if mark else ()
    except EngineRejected:
        return ()


async def _rendered(control: ControlClient, messages: list[dict[str, str]]) -> str:
    body = {"messages": messages, "add_generation_prompt": False}
    return (await control.read(_Prompt, "POST", "/apply-template", json=body)).prompt


async def _tokens(control: ControlClient, text: str, *, add_special: bool = True) -> TokenIds[int]:
    request = {"content": text, "add_special": add_special, "parse_special": True}
    return array("i", (await control.read(_Tokens, "POST", "/tokenize", json=request)).tokens)


def _check_all_text(messages: object) -> None:
    """Raises EngineRejected for a part that is no text: token ids do not identify its content."""
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        for number, part in enumerate(content if isinstance(content, list) else ()):
            if not isinstance(part, dict) or part.get("type") != "text":
                param = f"messages[{index}].content[{number}]"
                raise _rejected(f"{param} is not text: kvpin follows only text", param)


def _parts(prompt: Any) -> list[str | int]:  # noqa: ANN401 - JSON
    """The only prompt of the field: texts and token ids that follow each other."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return [prompt]
    # The server takes a list of nothing but texts for several prompts.
    is_one = isinstance(prompt, list) and any(map(_is_token_id, prompt))
    if is_one and all(isinstance(part, str) or _is_token_id(part) for part in prompt):
        return list(prompt)
    raise _rejected("kvpin follows only one prompt: a text, token ids, or a list of both", "prompt")


def _is_token_id(value: object) -> bool:
    return type(value) is int and 0 <= value <= _INT32_MAX


def _rejected(message: str, param: str) -> EngineRejected:
    return EngineRejected(message, status=400, param=param)
