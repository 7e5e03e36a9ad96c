"""msgspec's words about a value, in plain English."""

from __future__ import annotations

import re

_EXPECTED = re.compile(r"^Expected `(?P<kinds>[^`]+)`(?:, got `[^`]+`)?(?P<bound>[^`]*)")
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
    "bytes": "bytes",
}
_BOUNDS = {
    " > ": " above ",
    " >= ": " of at least ",
    " < ": " below ",
    " <= ": " of at most ",
    " of length >= ": " with a length of at least ",
    " of length <= ": " with a length of at most ",
}
_ZERO = re.compile(r"(?<=[0-9])[.]0(?![0-9])")
_BOUND = re.compile(r"^( of length)? [<>]=? ")


def plain_error(message: str) -> str:
    """The message of a `msgspec.ValidationError`; what follows in it, the place of the value, stays."""
    found = _EXPECTED.match(message)
    if found is None:
        return message
    kinds = [_KINDS.get(kind, kind) for kind in found["kinds"].split(" | ") if kind != "null"] or ["null"]
    bound = _BOUND.sub(lambda sign: _BOUNDS[sign[0]], found["bound"])
    return f"must be {' or '.join(kinds)}{_ZERO.sub('', bound)}{message[found.end() :]}"
