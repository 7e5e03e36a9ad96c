"""Validation errors in plain English."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from proxy.settings.fields import NAME_PATTERN, SHOWN_PATTERN

_TABLE, _WHOLE, _NUMBER, _LIST = (
    f"it must be {what}"
    for what in ("a table of settings, not a single value", "a whole number", "a number", "a list")
)
_TIME = "it must be a time with its zone, as in 2027-01-31T00:00:00Z"
# By the library's name of the error; in braces, what it tells of the limit.
_PLAIN = {
    "missing": "it is missing",
    "extra_forbidden": "there is no such setting",
    "model_type": _TABLE,
    "model_attributes_type": _TABLE,
    "dict_type": _TABLE,
    "tuple_type": _LIST,
    "too_short": "it must not be empty",
    "timezone_aware": _TIME,
    "datetime_type": _TIME,
    "datetime_parsing": _TIME,
    "datetime_from_date_parsing": _TIME,
    "datetime_object_invalid": _TIME,
    "list_type": _LIST,
    "int_type": _WHOLE,
    "int_parsing": _WHOLE,
    "int_from_float": _WHOLE,
    "float_type": _NUMBER,
    "float_parsing": _NUMBER,
    "finite_number": _NUMBER,
    "bool_type": "it must be true or false",
    "bool_parsing": "it must be true or false",
    "string_type": "it must be text",
    "path_type": "it must be a path",
    "byte_size": "it must be a number of bytes, or one with a unit such as 4GiB",
    "byte_size_unit": "it must be a number of bytes, or one with a unit such as 4GiB",
    "literal_error": "it must be {expected}",
    "greater_than": "it must be above {gt}",
    "greater_than_equal": "it must be at least {ge}",
    "less_than_equal": "it must be at most {le}",
    "string_too_short": "it must not be empty",
    "string_too_long": "it must have at most {max_length} characters",
}
# By the pattern of a text.
_BY_PATTERN = {
    NAME_PATTERN: "it must have 1 to 64 letters, digits, dots, dashes or underscores"
    ", the first a letter or digit",
    SHOWN_PATTERN: "it must have 1 to 64 characters of ASCII, without spaces",
}


def details_of(error: ValidationError) -> list[ErrorDetails]:
    """The errors, without the values, which may be secret."""
    return error.errors(include_url=False, include_input=False)


def plain_message(error: ErrorDetails) -> str:
    """One error in plain English."""
    limits = error.get("ctx", {})
    plain = _BY_PATTERN.get(limits.get("pattern", "")) or _PLAIN.get(error["type"])
    if plain is not None:
        return plain.format_map(_shown(limits.items()))
    return error["msg"].removeprefix("Value error, ")


def _shown(limits: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Limits as people write them: 0 for 0.0."""
    return {name: f"{limit:g}" if isinstance(limit, float) else limit for name, limit in limits}
