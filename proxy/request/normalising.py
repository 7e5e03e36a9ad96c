"""Applies the rules of `proxy/core/normalise.py` to the requests that they were chosen for, and the repairs
of `proxy/core/message_repair.py` to those whose messages the model's chat template would lose."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec
import structlog
from msgspec.structs import replace
from typing_extensions import override

from engine_adapter import UNREADABLE, JsonBody, decode_object
from engine_adapter.body import BILLING, UnreadableField
from engine_adapter.off_loop import JSON_BYTES_PER_MS, VALUES_PER_MS, JsonInStrings, off_loop
from engine_adapter.prompt.template_trials import MessageShape
from proxy.core.message_repair import Repair, may_need, repaired
from proxy.core.normalise import FIELDS, FINDS_VALUES, Rule, normalised
from proxy.core.prompt_values import has_reference
from proxy.errors import EngineFailed
from proxy.request.calls import Call, Session
from proxy.request.records import Sources
from proxy.request.stages import DONE, ERROR, Event, Stage
from proxy.request.translate import CHAT_PATH, INPUT_TOKENS_PATH, RESPONSES_PATH
from proxy.request.translate.translation import Chat, read_chat

# --- the reasoning of earlier answers, for clients that do not send it back: the rule `reasoning_kept` --
# An engine's cache holds the reasoning of its answer. If the next prompt lacks it, all that follows is
# computed again. kvpin has seen the answer, and puts its reasoning back; the chat template decides if it
# stays. An answer is known by all that came before it and by what it says beside its reasoning. So the
# reasoning of one conversation gets into no other, and a tenant gets only its own.

LIMIT_BYTES = 32 << 20  # reasoning that is kept, of all tenants together
OVERHEAD = 300  # bytes of memory that each takes beside its text, which may be one character
# Fields with the thoughts of a message; a client that sends one of them keeps its reasoning itself.
_THOUGHTS = ("reasoning_content", "reasoning")
# Fields beside the messages that a prompt is made of.
_BESIDE = ("tools", "functions", "documents", "chat_template_kwargs")
_WORK_OF_A_VALUE = 8  # hashing a value takes so many times as long as looking at it
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
    if isinstance(arguments, str) and not JsonInStrings().is_too_much(arguments):
        with suppress(*UNREADABLE):
            return msgspec.json.decode(arguments)
    return arguments


# --- normalising ----------------------------------------------------------------------------------------

_log = structlog.get_logger(__name__)

_MESSAGES = "/v1/messages"
ROUTES = frozenset({CHAT_PATH, _MESSAGES, f"{_MESSAGES}/count_tokens", RESPONSES_PATH, INPUT_TOKENS_PATH})
"""Routes whose prompts the rules know."""
Change = Rule | Repair  # what changes a prompt
REPAIRS = {
    MessageShape.DEVELOPER: Repair.DEVELOPER_AS_SYSTEM,
    MessageShape.SEVERAL_SYSTEMS: Repair.SYSTEMS_JOINED,
    MessageShape.LATE_SYSTEM: Repair.LATE_SYSTEM_IN_TURN,
    MessageShape.SYSTEM: Repair.SYSTEM_IN_TURN,
    MessageShape.CALL: Repair.CALL_AS_TEXT,
    MessageShape.LONE_RESULT: Repair.RESULT_IN_TURN,
    MessageShape.NULL_CONTENT: Repair.NULL_AS_EMPTY,
    MessageShape.TURNS: Repair.TURNS_ALTERNATE,
}
"""What repairs the messages that a template loses."""
_BILLING = BILLING.encode()
# Bytes of a body in which values are looked for in about 1 ms, and lines or texts.
_SEARCHED_BYTES_PER_MS = 8 * 1024
_SEARCHED_LINES_PER_MS = 100


class Changed(NamedTuple):
    """A request as rules and repairs made it."""

    call: Call
    by: tuple[Change, ...]  # what changed it
    told: Mapping[str, str]  # reference → value, of the values that its prompt now tells in another place


@dataclass(frozen=True, slots=True)
class ChosenRules:
    """Rules that the operator chose for some requests."""

    rules: frozenset[Rule]
    # tenant, model: only for requests of this tenant, and for this model; None for all.
    tenant: str | None = None
    model: str | None = None
    repairs: bool = True  # messages that the model's chat template would lose are repaired

    def suit(self, tenant: str | None, models: Sequence[str | None]) -> bool:
        """True if they are for requests of a tenant, for a model that has these names."""
        return self.tenant in (None, tenant) and (self.model is None or self.model in models)


@dataclass(frozen=True, slots=True)
class Normalising:
    """The rules of all requests."""

    chosen: Sequence[ChosenRules] = ()
    # That of earlier answers, for those requests with the rule `reasoning_kept`.
    reasoning: KeptReasoning = field(default_factory=KeptReasoning)

    def may_apply(self, call: Call, lost: AbstractSet[MessageShape]) -> bool:
        """False if `apply` surely changes nothing."""
        body = call.body
        if self.chosen or call.route != CHAT_PATH:
            return True
        return bool(lost) and isinstance(body, JsonBody) and may_need(body, _needed(frozenset(lost)))

    async def apply(
        self, call: Call, model: str, lost: AbstractSet[MessageShape] = frozenset()
    ) -> Changed | None:
        """The request with a normalised body, and what changed it; None if it stays as it is. `model`: of its
        pool. `lost`: messages that the chat template of this model refuses or leaves out."""
        body, route = call.body, call.route
        if not isinstance(body, JsonBody) or route not in ROUTES:
            return None
        repairs = _repairs(body, lost)
        if not (self.chosen or repairs or route.startswith(_MESSAGES)):
            return None
        suiting = self._suiting(call, model)
        rules = _rules_of(suiting) - {Rule.REASONING_KEPT}
        if route.startswith(_MESSAGES) and _BILLING in body.raw:
            rules |= {Rule.BILLING_LINE}
        if rules & FINDS_VALUES and _may_be_kept(route, body):
            rules -= FINDS_VALUES  # what is shown again, or the next prompt, would have these references
        repairs = repairs if all(entry.repairs for entry in suiting) else frozenset()
        return await _changed(call, body, model, rules, repairs)

    async def repaired(self, chat: Call, model: str, lost: AbstractSet[MessageShape]) -> Changed | None:
        """A chat that was made of a request of another API, with the repairs that `apply` makes. Rules were
        applied to the request. None if it stays as it is."""
        body = chat.body
        if not isinstance(body, JsonBody) or not (repairs := _repairs(body, lost)):
            return None
        if not all(entry.repairs for entry in self._suiting(chat, model)):
            return None
        return await _changed(chat, body, model, frozenset(), repairs)

    async def with_reasoning(self, chat: Call, model: str) -> tuple[Call, tuple[Rule, ...], Keep | None]:
        """A chat with the reasoning that its client left out, where that rule was chosen; the rule, if it did
        so; and what keeps the reasoning of its answer, None if nothing is to be kept."""
        body = chat.body
        if chat.route != CHAT_PATH or not isinstance(body, JsonBody):
            return chat, (), None
        if Rule.REASONING_KEPT not in _rules_of(self._suiting(chat, model)):
            return chat, (), None
        whole, keep = await self.reasoning.put_back(body, chat.tenant)
        if whole is body:
            return chat, (), keep
        return replace(chat, body=whole), (Rule.REASONING_KEPT,), keep

    def _suiting(self, call: Call, model: str) -> list[ChosenRules]:
        return [entry for entry in self.chosen if entry.suit(call.tenant, (model, call.model))]


def _may_be_kept(route: str, body: JsonBody) -> bool:
    """True if the request and its answer may be kept, by the engine or kvpin, and be shown or continued
    later: responses unless the client says no, chats only if it asks for that."""
    store = body.get("store")
    if route.startswith(RESPONSES_PATH):  # or a count of its prompt
        return store is not False
    return route == CHAT_PATH and store is True


@lru_cache
def _needed(lost: frozenset[MessageShape]) -> frozenset[Repair]:
    """The repairs of a model whose chat template loses these messages."""
    return frozenset(REPAIRS[shape] for shape in lost)


def _repairs(body: JsonBody, lost: AbstractSet[MessageShape]) -> frozenset[Repair]:
    """The repairs that a body may need; none if it surely needs none."""
    needed = _needed(frozenset(lost)) if lost else frozenset[Repair]()
    return needed if needed and may_need(body, needed) else frozenset()


def _rules_of(chosen: Sequence[ChosenRules]) -> frozenset[Rule]:
    return frozenset[Rule]().union(*(entry.rules for entry in chosen))


@lru_cache(maxsize=4096)
def _tell(session: Session | None, tenant: str | None, model: str, repairs: tuple[Repair, ...]) -> None:  # noqa: ARG001
    """Tells of repairs, once for each session."""
    names = ", ".join(repairs)
    _log.info("the chat template loses messages: repaired", model=model, tenant=tenant, repairs=names)


NO_RULES = Normalising()  # no rule was chosen


async def _changed(
    call: Call, body: JsonBody, model: str, rules: AbstractSet[Rule], repairs: frozenset[Repair]
) -> Changed | None:
    if not (rules or repairs):
        return None
    ms = 2 * len(body.raw) / JSON_BYTES_PER_MS + body.n_values / VALUES_PER_MS
    if rules & FINDS_VALUES:
        n_lines = body.raw.count(b"\\") + body.n_values  # in JSON, a line feed has a backslash
        ms += len(body.raw) / _SEARCHED_BYTES_PER_MS + n_lines / _SEARCHED_LINES_PER_MS
    changed = await off_loop(lambda: _applied(call, body, rules, repairs), ms=ms)
    if changed is not None and (mended := tuple(each for each in changed.by if isinstance(each, Repair))):
        _tell(call.session, call.tenant, model, mended)
    return changed


def _applied(
    call: Call, body: JsonBody, rules: AbstractSet[Rule], repairs: AbstractSet[Repair]
) -> Changed | None:
    wanted = ("system",) if rules == {Rule.BILLING_LINE} and not repairs else FIELDS
    try:
        fields = {name: body.view(name) for name in wanted if name in body}
    except UnreadableField:  # whoever reads the request next says so
        return None
    if rules & FINDS_VALUES and has_reference(body.raw):
        rules -= FINDS_VALUES  # an answer that repeats it would get another value
    try:
        changes, applied, told = normalised(fields, rules)
    except RecursionError:  # tools that are nested hundreds of levels deep
        changes, applied, told = normalised(fields, ())
    more, mended = repaired(fields | changes, repairs)
    if not (applied or mended):
        return None
    return Changed(replace(call, body=body.replace(**changes | more)), (*applied, *mended), told)
