"""Limits on what one call in a chat template may make: `text.center(10**10)` would fill the machine's memory.

The length of the result is computed before the call. templates.py limits the whole text and its time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import wraps
from string import Formatter
from typing import Any

from jinja2 import pass_eval_context
from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS
from jinja2.nodes import EvalContext
from jinja2.utils import generate_lorem_ipsum

# The longest text that a call may make, in characters.
MAX_LENGTH = 64 << 20
# Width and precision of a `%` conversion.
_CONVERSION = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(\*|\d*)(?:\.(\*|\d*))?")
_ENDLESS = MAX_LENGTH + 1


def check_length(length: int) -> None:
    """Raises SecurityError for too long a text."""
    if length > MAX_LENGTH:
        raise SecurityError(f"a chat template must not make a text of over {MAX_LENGTH >> 20} Mi characters")


def printf_length(form: str) -> int:
    """Characters that the widths of `form % values` add. A width that is a value itself counts as endless."""
    widths = [width for found in _CONVERSION.findall(form) for width in found if width]
    return _ENDLESS if "*" in widths else sum(map(int, widths))


def _format_length(form: str) -> int:
    """The same for `form.format(values)`."""
    specs = [spec for _, _, spec, _ in Formatter().parse(form) if spec]
    nested = any("{" in spec for spec in specs)
    return _ENDLESS if nested else sum(int(width) for spec in specs for width in re.findall(r"\d+", spec))


def _replaced_length(text: str, old: str, new: str, count: int | None = None) -> int:
    found = text.count(old)
    return (found if count is None or count < 0 else min(found, count)) * len(new)


def _translated_length(text: str, table: Any) -> int:  # noqa: ANN401 - as the template has it
    made = table.values() if isinstance(table, dict) else ()
    return len(text) * max((len(each) for each in made if isinstance(each, str)), default=0)


def _width(_text: str, width: int, *_rest: object) -> int:
    return width


_METHODS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _width),
    "expandtabs": lambda text, tabsize=8: text.count("\t") * tabsize,
    "replace": _replaced_length,
    "translate": _translated_length,
    "format": lambda text, *_values, **_named: _format_length(text),
    "format_map": lambda text, _values: _format_length(text),
}
BOUNDED_METHODS = frozenset({*_METHODS, "join"})
"""Methods of strings that can make much of little."""


def bounded_method(text: str, name: str, method: Callable[..., str]) -> Callable[..., str]:
    """The `method` of that `name` of a string, with its limit."""
    if name == "join":
        return lambda pieces: _join(text, list(pieces))
    return _bounded(method, lambda *args, **named: _METHODS[name](text, *args, **named))


def _join(between: str, pieces: list[Any]) -> str:
    check_length(sum(len(piece) + len(between) for piece in pieces if isinstance(piece, str)))
    return between.join(pieces)


def _bounded(call: Callable[..., Any], length: Callable[..., int]) -> Callable[..., Any]:
    @wraps(call)
    def bounded(*args: Any, **named: Any) -> Any:  # noqa: ANN401 - as the template has it
        check_length(length(*args, **named))
        return call(*args, **named)

    return bounded


@wraps(FILTERS["join"])
@pass_eval_context
def _join_filter(
    context: EvalContext, value: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> str:
    pieces = list(value)
    check_length(sum(len(piece) for piece in pieces if isinstance(piece, str)) + len(d) * len(pieces))
    joined: str = FILTERS["join"](context, pieces, d, attribute)
    return joined


def _indented_length(s: str, width: int | str = 4, *_rest: object, **_named: object) -> int:
    return (len(str(s).splitlines()) + 1) * (width if isinstance(width, int) else len(width))


def _wrapped_length(
    _environment: object, s: str, _width: int = 79, _long: object = True, wrapstring: str | None = None,
    **_named: object,
) -> int:  # fmt: skip
    return len(s) * len(wrapstring or "")


_LENGTHS: dict[str, Callable[..., int]] = {
    # Lists take eight bytes for each place.
    "batch": lambda _value, linecount, *_fill, **_named: 8 * linecount,
    "slice": lambda _context, _value, slices, *_fill, **_named: 8 * slices,
    "center": lambda _value, width=80: width,
    "format": lambda value, *_values, **_named: printf_length(str(value)),
    "indent": _indented_length,
    "replace": lambda _context, s, old, new, count=None: _replaced_length(str(s), str(old), str(new), count),
    "wordwrap": _wrapped_length,
}
# A lorem ipsum has words of up to eleven letters.
bounded_lipsum = _bounded(
    generate_lorem_ipsum,
    lambda n=5, html=True, min=20, max=100: 12 * n * max,  # noqa: A006, ARG005 - jinja2's
)
"""jinja2's global of that name, with its limit."""
BOUNDED_FILTERS: dict[str, Callable[..., Any]] = {
    **{name: _bounded(FILTERS[name], length) for name, length in _LENGTHS.items()},
    "join": _join_filter,
}
"""jinja2's filters that can make much of little, with their limits."""
