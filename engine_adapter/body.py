"""A JSON request body that keeps its bytes unless a field must change."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, KeysView, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

import msgspec

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of decoding: the bytes are no JSON, of another type, not UTF-8, or nested too deeply."""
_T = TypeVar("_T")
RawFields = dict[str, msgspec.Raw]
"""The fields of a JSON object, undecoded."""
decode_object = msgspec.json.Decoder(RawFields).decode
"""The fields of a JSON object; raises one of `UNREADABLE`."""
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
# A list of numbers is not decoded to find out that it is one: it may be a prompt of many token ids.
_NO_NUMBERS = re.compile(rb'\[\s*["[{]')
# Of a longer body, nobody counts the values: a walk through it leaves the event loop.
_COUNTED_BYTES = 1 << 20
_NOTHING = re.compile(rb'null|""|\[\s*\]')
BILLING = "x-anthropic-billing-header"
"""Begins the line that Claude Code puts before its system prompt."""
SCHEMA_DATA = ("const", "default", "enum", "examples")
"""Keywords of a JSON schema whose values are data, not schemas."""
SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Those that hold schemas under names of the client's."""
# Fields of a plain chat: none of them changes its prompt, its identity or who may see it.
_OF_PLAIN_CHATS = frozenset(
    {
        "frequency_penalty", "ignore_eos", "max_completion_tokens", "max_tokens", "messages", "min_p",
        "min_tokens", "model", "presence_penalty", "seed", "stream", "stream_options", "temperature",
        "top_k", "top_p", "user",
    }
)  # fmt: skip
_SPEAKERS = ("system", "user", "assistant")
_Text = Annotated[dict[Literal["role", "content"], str], msgspec.Meta(min_length=2)]
_decode_texts = msgspec.json.Decoder(Annotated[list[_Text], msgspec.Meta(min_length=1)]).decode
# Messages of a longer body are not decoded on the event loop.
_PLAIN_BYTES = 256 * 1024


class UnreadableField(msgspec.ValidationError):
    """A field is valid JSON but has no usable value, such as a number that is too large or half a surrogate
    pair. `param`: the field, with the path inside it."""

    def __init__(self, name: str, error: msgspec.DecodeError) -> None:
        message, _, path = str(error).partition(" - at `$")
        self.param = name + path.rstrip("`")
        super().__init__(f"{self.param} cannot be read: {message[:1].lower()}{message[1:]}")


class TooManyItems(Exception):
    """A list has more items than its reader takes."""


class JsonBody:
    """The bytes a client sent, and their top-level fields.

    Values stay raw until requested. A changed body re-encodes only the top level, so all other values keep
    their bytes. Of a repeated key the last value counts, as in engines.

    Attributes:
        is_plain: it was read and found to be a chat of texts that a system, a user or an assistant says, and
            no field asks for anything else: most chats without tools. Nobody need look for more in it.
        notes: what its readers found in it once.
    """

    __slots__ = ("_fields", "_n_values", "_scalars", "_views", "is_plain", "notes", "raw")

    def __init__(self, raw: bytes) -> None:
        """Raises msgspec.DecodeError if `raw` is not a JSON object."""
        self.raw = raw
        self._fields = _checked(decode_object, raw)
        self._scalars: dict[str, Any] = {}  # decoded; not lists and objects, which callers may change
        self._views: dict[str, Any] = {}  # decoded; no caller changes them
        self._n_values: int | None = None
        self.is_plain, self.notes = False, dict[str, Any]()

    def find_plain(self) -> bool:
        """Finds out whether it `is_plain`. A long one is not."""
        raw = self._fields.get("messages")
        if raw is None or not self._fields.keys() <= _OF_PLAIN_CHATS or len(self.raw) > _PLAIN_BYTES:
            return False
        try:
            messages = _decode_texts(raw)
        except UNREADABLE:
            return False
        if not all(map(is_said, messages)):
            return False
        self._views["messages"] = messages
        self.is_plain = True
        return True

    @property
    def n_values(self) -> int:
        """At most how many values, lists and objects it has, counted once: the price of a walk through them
        (`VALUES_PER_MS` in `off_loop.py`)."""
        if self._n_values is None:
            raw = self.raw
            is_long = len(raw) > _COUNTED_BYTES
            self._n_values = len(raw) if is_long else sum(map(raw.count, (b",", b"[", b"{")))
        return self._n_values

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def get(self, name: str) -> Any:  # noqa: ANN401 - JSON
        """The decoded value of a field, None if it is absent or null. Raises UnreadableField if the value
        cannot be decoded."""
        if name in self._scalars:
            return self._scalars[name]
        raw = self._fields.get(name)
        if raw is None:
            return None
        try:
            value = msgspec.json.decode(raw)
        except UNREADABLE as error:
            raise UnreadableField(name, _fault_of(error)) from error
        if not isinstance(value, (dict, list)):
            self._scalars[name] = value
        return value

    def view(self, name: str) -> Any:  # noqa: ANN401 - JSON
        """Like `get`, but decoded once, for all who read it: do not change it."""
        if name not in self._views:
            self._views[name] = self.get(name)
        return self._views[name]

    def items(self, name: str, most: int | None = None) -> list[msgspec.Raw] | None:
        """The items of a list that begins with a string, a list or an object, undecoded; None if the field is
        anything else.

        Raises:
            UnreadableField: the list cannot be decoded.
            TooManyItems: it has more than `most`. This is found out without reading the others.
        """
        raw = self._fields.get(name)
        if raw is None or _NO_NUMBERS.match(raw) is None:
            return None
        if most is not None and len(memoryview(raw)) > 2 * most and _has_more(raw, most):
            raise TooManyItems(name)
        try:
            return _checked(_decode_items, raw)
        except msgspec.DecodeError as error:
            raise UnreadableField(name, error) from error

    @property
    def names(self) -> KeysView[str]:
        """The names of its fields."""
        return self._fields.keys()

    def raw_of(self, name: str) -> memoryview:
        """The bytes of a field that is present."""
        return memoryview(self._fields[name])

    def has_any(self, names: AbstractSet[str]) -> bool:
        """Returns whether any of these fields is present; null counts."""
        return not self._fields.keys().isdisjoint(names)

    def gives(self, name: str) -> bool:
        """True if a field has a value other than null, "" and []; decodes nothing."""
        raw = self._fields.get(name)
        return raw is not None and _NOTHING.fullmatch(raw) is None

    def decoded(self) -> Any:  # noqa: ANN401 - JSON
        """The whole body, decoded. Raises msgspec.DecodeError if a value in it cannot be decoded."""
        return _checked(msgspec.json.decode, self.raw)

    def hint(self, name: str) -> Any:  # noqa: ANN401 - JSON
        """Like `get`, but None if the value cannot be decoded: for fields that the engine checks."""
        try:
            return self.get(name) if name in self._fields else None
        except UnreadableField:
            return None

    def replace(self, **changes: Any) -> JsonBody:  # noqa: ANN401 - JSON
        """A new body with these fields set; None removes a field."""
        fields = dict(self._fields)
        for name, value in changes.items():
            if value is None:
                fields.pop(name, None)
            else:
                fields[name] = msgspec.Raw(msgspec.json.encode(value))
        changed = JsonBody.__new__(JsonBody)
        changed.raw, changed._fields = msgspec.json.encode(fields), fields
        kept, viewed = self._scalars.items(), self._views.items()
        changed._scalars = {name: value for name, value in kept if name not in changes}  # noqa: SLF001
        changed._n_values, changed.notes = None, {}  # noqa: SLF001
        changed.is_plain = self.is_plain and "messages" not in changes and changes.keys() <= _OF_PLAIN_CHATS
        changed._views = {name: value for name, value in viewed if name not in changes}  # noqa: SLF001
        return changed

    def forget(self) -> None:
        """Frees the memory: the body was sent and is not needed again. To read it now is a bug."""
        del self.raw, self._fields, self._scalars, self._views, self.notes


def is_said(message: Mapping[str, Any]) -> bool:
    """True if a message of a role and a text is one that all engines give their templates alike."""
    role = message["role"]
    return role in _SPEAKERS and not (role == "system" and message["content"].startswith(BILLING))


def _has_more(raw: msgspec.Raw, most: int) -> bool:
    """True if a list has more than `most` items: its decoder stops at the next one."""
    try:
        _first_items(most)(raw)
    except UNREADABLE as error:
        return str(error).endswith(f"`$[{most}]`")
    return False


@cache
def _first_items(n: int) -> Callable[[msgspec.Raw], object]:
    """A decoder of lists that takes any `n` items, and no other behind them."""
    return msgspec.json.Decoder(tuple[(msgspec.Raw,) * n + (Literal["\0"],)]).decode  # type: ignore[misc]


def _checked(decode: Callable[[bytes | msgspec.Raw], _T], raw: bytes | msgspec.Raw) -> _T:
    """Decodes `raw`; every fault of the client's becomes a msgspec.DecodeError."""
    try:
        return decode(raw)
    except (UnicodeDecodeError, RecursionError) as error:
        raise _fault_of(error) from None


def _fault_of(error: Exception) -> msgspec.DecodeError:
    """The client's fault that one of `UNREADABLE` tells."""
    if isinstance(error, msgspec.DecodeError):
        return error
    is_text = isinstance(error, UnicodeDecodeError)
    return msgspec.DecodeError(f"it is not UTF-8 ({error})" if is_text else "it is nested too deeply")


# --- A request body that is passed on as it arrives: a form with files, or a file -----------------------


@dataclass(frozen=True, slots=True)
class NamedModel:
    """The model that a form names, and the bytes of the form that hold this name."""

    model: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Upload:
    """A body that is passed on as it arrives.

    Attributes:
        chunks: its bytes; they can be read once.
        length: its number of bytes; None if its client did not say.
        named: the model it names; None if it names none, or if nobody has looked.
    """

    chunks: AsyncIterator[bytes]
    length: int | None = None
    named: NamedModel | None = None

    def renamed(self, model: str) -> Upload:
        """The body with another name of its model. All other bytes stay as they are."""
        named = self.named
        if named is None:
            return self
        name = model.encode()
        now = NamedModel(model, named.start, named.start + len(name))
        length = None if self.length is None else self.length + now.end - named.end
        return Upload(_replaced(self.chunks, named, name), length, now)


async def _replaced(chunks: AsyncIterator[bytes], named: NamedModel, name: bytes) -> AsyncIterator[bytes]:
    """The chunks with `name` in place of the old name."""
    at = 0
    async for chunk in chunks:
        before, after = chunk[: max(named.start - at, 0)], chunk[max(named.end - at, 0) :]
        begins = 0 <= named.start - at < len(chunk)
        yield before + (name if begins else b"") + after
        at += len(chunk)
