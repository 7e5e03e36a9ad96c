"""The sandbox of chat templates: jinja2's, with limits, and a short way for what templates read most.

jinja2's keeps a template from objects that are not its own, not from time and memory: `text.center(10**10)`
would fill the machine's. Where one call can make much of little, the length of its result is computed before
the call. Where the result is at most some times its parts, as for `text + text`, it is looked at after. What
calls make, and long texts, also count together: a template may double a text, but not many times. Loops and
macros count their steps, and have limits of CPU time and of the memory that fills up meanwhile. templates.py
limits the whole text.

Up to two thirds of a template's time go into jinja2's checks of each `message.role` and `content.strip`. The
result is always the same for the keys of a plain dict and the methods of a plain string.
"""

from __future__ import annotations

import re
import resource
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial, wraps
from itertools import chain, repeat
from pathlib import Path
from string import Formatter
from typing import Any

from jinja2 import nodes, pass_eval_context
from jinja2.compiler import CodeGenerator, Frame, MacroRef, optimizeconst
from jinja2.exceptions import SecurityError, TemplateRuntimeError
from jinja2.filters import FILTERS
from jinja2.nodes import EvalContext
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import generate_lorem_ipsum

# The longest template, in characters: many times those of models. It takes 3 s and 600 MB to compile.
MAX_TEMPLATE = 256 << 10
# The longest text that a call may make; all texts of calls, and long texts, of one rendering: in characters.
MAX_LENGTH = 64 << 20
MAX_LONG = 512 << 20
# From this length on, a text is long.
LONG = 64 << 10
# The most CPU seconds that one rendering's loops and macros may take: many times those of the longest body.
MAX_S = 20.0
# The same in the main thread. There only short chats are rendered, and all other requests wait meanwhile.
MAX_LOOP_S = 1.0
# Bytes by which the process may grow while loops and macros run.
MAX_BYTES = 1 << 30
# CPU seconds between two looks at that. A usual chat takes less.
_LOOK_S = 0.01
# Steps of all threads between two looks at the clock.
_STEPS = 256
# Texts that may be put together before their length is looked at.
_FEW = 8
# The longest list.
MAX_PLACES = 1 << 20
# The longest text or list, and the most bits of a number, that `*` and `**` may make.
MAX_PRODUCT = 1 << 20
# Width and precision of a `%` conversion.
_CONVERSION = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(\*|\d*)(?:\.(\*|\d*))?")
_ENDLESS = MAX_LENGTH + 1
_STATM, _PAGE = Path("/proc/self/statm"), resource.getpagesize()


class _Made(threading.local):
    """Output and work of one rendering so far.

    Attributes:
        length: the characters of the long texts.
        until: the thread's CPU seconds at which it takes too long; None before the first look at the clock.
        look: those of the next look at the memory.
        most: the process's bytes of memory at which it takes too much; None before the first look at those.
    """

    length = 0
    until: float | None = None
    look = 0.0
    most: int | None = None


_made = _Made()


def begin_rendering() -> None:
    """Nothing was made yet."""
    _made.length = 0
    _made.until = _made.most = None


def _look(_: None) -> Iterator[None]:
    """Steps until the next look; an error where this thread's rendering takes too long."""
    now = time.thread_time()
    if _made.until is None:
        _made.until, _made.look = now + _most_s(), now + _LOOK_S
    if now > _made.until:
        return _failing(f"loop for more than {_most_s():g} s of CPU time")
    if now > _made.look:
        _made.look, taken = now + _LOOK_S, _memory()
        _made.most = taken + MAX_BYTES if _made.most is None else _made.most
        if taken > _made.most:
            return _failing(f"take over {MAX_BYTES >> 30} GiB of memory")
    return repeat(None, _STEPS)


def _most_s() -> float:
    return min(MAX_S, MAX_LOOP_S) if threading.current_thread() is threading.main_thread() else MAX_S


def _memory() -> int:
    """The process's bytes of memory; 0 where the system does not tell."""
    try:
        return int(_STATM.read_bytes().split()[1]) * _PAGE
    except OSError:
        return 0


def _failing(what: str) -> Iterator[None]:
    """Raises TemplateRuntimeError. Raised by `_look`, it would end `step` for good."""
    yield from ()
    raise TemplateRuntimeError(f"a chat template must not {what}")


step: Callable[[], None] = partial(next, chain.from_iterable(map(_look, repeat(None))))
"""Called when a loop or a macro begins once more, of whichever thread. It is made of C code: as a function it
would take a fifth of a template's time."""


def check_length(length: int) -> None:
    """Raises SecurityError for too long a text, or for too many texts."""
    _made.length += length
    if length > MAX_LENGTH or _made.length > MAX_LONG:
        raise SecurityError(
            f"a chat template must not make a text of over {MAX_LENGTH >> 20} Mi characters, or so many "
            f"texts that they have over {MAX_LONG >> 20} Mi"
        )


def checked(made: Any) -> Any:  # noqa: ANN401 - as the template has it
    """Returns the rendered text. Raises SecurityError if it is too long."""
    kind = made.__class__
    if kind is str:
        if len(made) > LONG:
            check_length(len(made))
    elif (kind is list or kind is tuple) and len(made) > MAX_PLACES:
        raise SecurityError(f"a chat template must not make a list of over {MAX_PLACES >> 20} Mi places")
    return made


def concat(pieces: Iterable[str]) -> str:
    """The pieces as one text. Raises SecurityError if it is too long."""
    texts = pieces if isinstance(pieces, list) else list(pieces)
    if len(texts) > _FEW:
        check_length(sum(map(len, texts)))
    text = "".join(texts)
    if len(text) > LONG and len(texts) <= _FEW:
        check_length(len(text))
    return text


def joined(pieces: Iterable[Any]) -> str:
    """The length of joined pieces of any kind."""
    return concat(map(str, pieces))


def printf_length(form: str, values: Any) -> int:  # noqa: ANN401 - as the template has it
    """The characters that `form % values` adds: widths and texts. A width that is a value itself counts as
    endless."""
    widths = [width for found in _CONVERSION.findall(form) for width in found if width]
    if "*" in widths:
        return _ENDLESS
    if isinstance(values, dict):
        texts = form.count("%") * _longest(values.values())
    else:
        texts = sum(map(_length, values)) if isinstance(values, tuple) else _length(values)
    return texts + sum(map(int, widths))


def _format_length(form: str, *values: object, **named: object) -> int:
    """The same for `form.format(values)`, where each value may stand in many places."""
    places = [(name, spec) for _, name, spec, _ in Formatter().parse(form) if name is not None]
    if any("{" in (spec or "") for _, spec in places):
        return _ENDLESS
    widths = sum(int(width) for _, spec in places for width in re.findall(r"\d+", spec or ""))
    return widths + len(places) * _longest([*values, *named.values()])


def _longest(values: Iterable[Any]) -> int:
    return max(map(_length, values), default=0)


def _length(value: object) -> int:
    return len(value) if isinstance(value, str) else 0


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
    "format": _format_length,
    "format_map": lambda text, values: _format_length(text, *values.values()),
}
BOUNDED_METHODS = frozenset({*_METHODS, "join"})
"""Methods of strings that can make much of little."""


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


_LENGTHS: dict[str, Callable[..., int]] = {
    # Lists take eight bytes for each place.
    "batch": lambda _value, linecount, *_fill, **_named: 8 * linecount,
    "slice": lambda _context, _value, slices, *_fill, **_named: 8 * slices,
    "center": lambda _value, width=80: width,
    "format": lambda value, *values, **named: printf_length(str(value), named or values),
    "indent": _indented_length,
    "replace": lambda _context, s, old, new, count=None: _replaced_length(str(s), str(old), str(new), count),
    "wordwrap": lambda _environment, s, _width=79, _long=True, wrapstring=None, **_named: (
        len(s) * len(wrapstring or "")
    ),
}
# A lorem ipsum has words of up to eleven letters.
bounded_lipsum = _bounded(
    generate_lorem_ipsum,
    lambda n=5, html=True, min=20, max=100: 12 * n * max,  # noqa: A006, ARG005 - jinja2's
)
"""jinja2's global of that name, with its limit."""
# They make a text or list some times as long as theirs: applied again and again, it has no end.
_GROWING = ("e", "escape", "forceescape", "list", "pprint", "string", "sum", "urlencode", "urlize", "xmlattr")


def checked_filter(made: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, whose results are checked."""

    @wraps(made)
    def looked_at(*args: Any, **named: Any) -> Any:  # noqa: ANN401 - as the template has it
        return checked(made(*args, **named))

    return looked_at


BOUNDED_FILTERS: dict[str, Callable[..., Any]] = {
    **{name: _bounded(FILTERS[name], length) for name, length in _LENGTHS.items()},
    **{name: checked_filter(FILTERS[name]) for name in _GROWING},
    "join": _join_filter,
}
"""jinja2's filters that can make much of little, with their limits."""


# --- the environment -----------------------------------------------------------------------------------

_OF_DICTS = frozenset(dir(dict))
# jinja2 replaces the two that could reach into objects; a name with an underscore is private.
_STRIPS = frozenset({"strip", "lstrip", "rstrip"})
_OF_STRINGS = frozenset(name for name in dir(str) if not name.startswith("_")) - BOUNDED_METHODS
# Written as the first statement of loops and macros.
_STEP = nodes.ExprStmt(nodes.EnvironmentAttribute("step()"))


class _CheckedCode(CodeGenerator):
    """jinja2's compiler, with a look at the results of `+` and `~`, and at each step of loops and macros.

    The look is written into the code, because a call would take a tenth of a template's time."""

    @optimizeconst
    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:  # noqa: N802 - jinja2 names it
        """Writes `left + right`. A sum with a number is no text."""
        consts = [each.value for each in (node.left, node.right) if isinstance(each, nodes.Const)]
        name = None if any(not isinstance(value, str) for value in consts) else self.temporary_identifier()
        self.write("(" if name is None else f"({name} if ({name} := ")
        self.visit(node.left, frame)
        self.write(" + ")
        self.visit(node.right, frame)
        self.write(
            ")"
            if name is None
            else f").__class__ is str and len({name}) <= {LONG} else environment.checked({name}))"
        )

    @optimizeconst
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - likewise
        """Writes `one ~ other ~ …`."""
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802 - likewise
        node.body.insert(0, _STEP)
        super().visit_For(node, frame)

    def macro_body(self, node: nodes.Macro | nodes.CallBlock, frame: Frame) -> tuple[Frame, MacroRef]:
        """Writes the body of a macro, or of a block that calls one."""
        node.body.insert(0, _STEP)
        return super().macro_body(node, frame)


class Sandbox(ImmutableSandboxedEnvironment):
    """Gives templates what `ImmutableSandboxedEnvironment` gives them, but no texts that fill memory.

    Attributes:
        checked: called with sums that are no short texts.
        joined: called with the many parts of a `~`.
        concat: called with the pieces of macros and of blocks that are set.
        step: called at each step of loops and macros.
        space: the characters that `strip` and `trim` remove; None: as Python has it.
    """

    code_generator_class = _CheckedCode
    intercepted_binops = frozenset({"*", "**", "%"})
    checked = staticmethod(checked)
    joined = staticmethod(joined)
    concat = staticmethod(concat)
    step = staticmethod(step)
    space: str | None = None

    def preprocess(self, source: str, name: str | None = None, filename: str | None = None) -> str:
        """A template's source before it is parsed. Raises SecurityError if it is too long."""
        if len(source) > MAX_TEMPLATE:
            raise SecurityError(f"a chat template must not have over {MAX_TEMPLATE >> 10} Ki characters")
        return super().preprocess(source, name, filename)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401
        """`left * right`, `left ** right` or `left % right` in a template. Raises SecurityError if the result
        would be too long."""
        if operator == "%":
            if isinstance(left, str):
                check_length(len(left) + printf_length(left, right))
        else:
            if (size := _size(operator, left, right)) > MAX_PRODUCT:
                raise SecurityError(
                    f"a chat template must not make anything as long as {operator!r} makes here"
                )
            check_length(size)
        return super().call_binop(context, operator, left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:  # noqa: ANN401 - as the template has it
        """`obj.attribute` in a template, or `obj["attribute"]` where there is no such attribute."""
        kind = type(obj)
        if kind is dict and attribute not in _OF_DICTS:
            if attribute in obj:
                return obj[attribute]
            return self.undefined(obj=obj, name=attribute)
        if kind is str and attribute in _OF_STRINGS:
            found = getattr(obj, attribute)
            is_own = self.space is not None and attribute in _STRIPS
            return (lambda chars=self.space: found(chars)) if is_own else found
        if kind is str and attribute in BOUNDED_METHODS:
            if attribute == "join":
                return lambda pieces: _join(obj, list(pieces))
            return _bounded(super().getattr(obj, attribute), partial(_METHODS[attribute], obj))
        return super().getattr(obj, attribute)


def _size(operator: str, left: Any, right: Any) -> int:  # noqa: ANN401 - as the template has it
    """The length of a product's text or list, or its bits; 0 where it is sure to be short, or an error."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length(), right.bit_length()
        return bits[0] * max(right, 0) if operator == "**" else sum(bits)
    sized, times = (right, left) if isinstance(left, int) else (left, right)
    if isinstance(times, int) and isinstance(sized, (str, bytes, list, tuple)):
        return len(sized) * max(times, 0)
    return 0
