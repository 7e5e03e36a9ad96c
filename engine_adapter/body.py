"""A JSON request body that goes on byte for byte unless a field has to change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

_T = TypeVar("_T")
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class UnreadableField(msgspec.ValidationError):
    """A field of a body is JSON, and yet no value: a number beyond all bounds, half a surrogate pair.

    Attributes:
        param: the field, with the path below it.
    """

    def __init__(self, name: str, error: msgspec.DecodeError) -> None:
        message, _, path = str(error).partition(" - at `$")
        self.param = name + path.rstrip("`")
        super().__init__(f"{self.param} cannot be read: {message[:1].lower()}{message[1:]}")


class JsonBody:
    """The bytes a client sent, and a view of their top-level fields.

    Values stay raw until asked for; a changed body re-encodes only the top level, so that every other
    value keeps its very bytes. A repeated key counts once, the last one, as engines read it too.
    """

    __slots__ = ("_fields", "raw")

    def __init__(self, raw: bytes) -> None:
        """Raises msgspec.DecodeError when `raw` is not a JSON object."""
        self.raw = raw
        self._fields = _checked(_decode_fields, raw)

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def get(self, name: str) -> Any:  # noqa: ANN401 - JSON
        """The decoded value of a field, None when it is absent or null.

        Raises:
            UnreadableField: only now is it seen that the value cannot be read.
        """
        raw = self._fields.get(name)
        try:
            return None if raw is None else _checked(msgspec.json.decode, raw)
        except msgspec.DecodeError as error:
            raise UnreadableField(name, error) from error

    def hint(self, name: str) -> Any:  # noqa: ANN401 - JSON
        """As `get`, of a field that is not ours to judge: None as well where it cannot be read."""
        try:
            return self.get(name)
        except UnreadableField:
            return None

    def replace(self, **changes: Any) -> JsonBody:  # noqa: ANN401 - JSON
        """A body with these fields set (None removes one); the original is left as it is."""
        fields = dict(self._fields)
        for name, value in changes.items():
            if value is None:
                fields.pop(name, None)
            else:
                fields[name] = msgspec.Raw(msgspec.json.encode(value))
        return JsonBody(msgspec.json.encode(fields))


def _checked(decode: Callable[[bytes | msgspec.Raw], _T], raw: bytes | msgspec.Raw) -> _T:
    """What `decode` makes of `raw`, with msgspec's one error for everything a client can get wrong."""
    try:
        return decode(raw)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(f"it is not UTF-8 ({error})") from None
    except RecursionError:
        raise msgspec.DecodeError("it is nested too deeply") from None
