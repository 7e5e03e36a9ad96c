"""The sandbox that chat templates run in: jinja2's, with a short way for what templates read most.

Up to two thirds of a template's time go into jinja2's checks of each `message.role` and `content.strip`. The
result is always the same for the keys of a plain dict and the methods of a plain string.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, MacroRef, optimizeconst
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine_adapter.prompt.bounds import (
    BOUNDED_METHODS,
    LONG,
    bounded_method,
    check_length,
    checked,
    concat,
    joined,
    printf_length,
    step,
)

# The longest text or list, and the most bits of a number, that `*` and `**` may make.
MAX_PRODUCT = 1 << 20
_OF_DICTS = frozenset(dir(dict))
# jinja2 replaces the two that could reach into objects; a name with an underscore is private.
_OF_STRINGS = frozenset(name for name in dir(str) if not name.startswith("_")) - BOUNDED_METHODS
# Written as the first statement of loops and macros.
_STEP = nodes.ExprStmt(nodes.EnvironmentAttribute("step()"))
# Values of one sum, or of one `~`, whose result is looked at only as a whole. Each look takes time.
_TERMS = 4


class _CheckedCode(CodeGenerator):
    """jinja2's compiler, with a look at the results of `+` and `~`, and at each step of loops and macros.

    The look is written into the code, because a call would take a tenth of a template's time.
    """

    @optimizeconst
    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:  # noqa: N802 - jinja2 names it
        """Writes `left + right`."""
        is_number = any(
            isinstance(each, nodes.Const) and not _is_text(each) for each in (node.left, node.right)
        )
        if is_number or getattr(node, "is_seen", False):
            self._write_sum(node, frame)
            return
        _mark(node)
        self._write_checked(lambda: self._write_sum(node, frame), is_text=_is_text(node))

    @optimizeconst
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - likewise
        """Writes `one ~ other ~ …`."""
        if len(node.nodes) <= _TERMS:
            self._write_checked(lambda: self._write_call("str_join((", node.nodes, frame), is_text=True)
        else:
            self._write_call("environment.joined((", node.nodes, frame)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802 - likewise
        """Writes `{% for … %}`."""
        node.body.insert(0, _STEP)
        super().visit_For(node, frame)

    def macro_body(self, node: nodes.Macro | nodes.CallBlock, frame: Frame) -> tuple[Frame, MacroRef]:
        """Writes the body of a macro, or of a block that calls one."""
        node.body.insert(0, _STEP)
        return super().macro_body(node, frame)

    def visit_Output(self, node: nodes.Output, frame: Frame) -> None:  # noqa: N802 - likewise
        """Writes `{{ … }}`. A piece of the whole text is looked at with the others, by templates.py."""
        for each in node.nodes if frame.buffer is None else ():
            if isinstance(each, nodes.Add):
                _mark(each)
        super().visit_Output(node, frame)

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:  # noqa: ANN401 - private
        """Leaves out the `str` of jinja2 where it does nothing."""
        if (
            _is_text(node)
            and finalize.src is None
            and not (frame.eval_ctx.volatile or frame.eval_ctx.autoescape)
        ):
            self.write("(")
        else:
            super()._output_child_pre(node, frame, finalize)

    def _write_sum(self, node: nodes.BinExpr, frame: Frame) -> None:
        self.write("(")
        self.visit(node.left, frame)
        self.write(" + ")
        self.visit(node.right, frame)
        self.write(")")

    def _write_call(self, begin: str, parts: Iterable[nodes.Expr], frame: Frame) -> None:
        self.write(begin)
        for part in parts:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def _write_checked(self, write: Callable[[], None], *, is_text: bool) -> None:
        """Writes an expression, and what looks at it. `is_text`: it can be nothing else."""
        name = self.temporary_identifier()
        self.write(f"({name} if (" if is_text else f"({name} if ({name} := ")
        if is_text:
            self.write(f"len({name} := ")
            write()
            self.write(f") <= {LONG}")
        else:
            write()
            self.write(f").__class__ is str and (len({name}) <= {LONG}")
        self.write(f") else environment.checked({name}))")


def _sums(node: nodes.BinExpr) -> Iterator[nodes.Add]:
    """The sums at the left of a sum, down to one that has so many values that it is looked at itself."""
    values, inner = 0, node
    while isinstance(inner.left, nodes.Add):
        values += not isinstance(inner.right, nodes.Const)
        if values > _TERMS - 2:
            return
        inner = inner.left
        yield inner


def _mark(node: nodes.BinExpr) -> None:
    """Marks the sums within a sum that need no look."""
    node.is_seen = True  # type: ignore[attr-defined]  # a mark of ours
    for inner in _sums(node):
        inner.is_seen = True  # type: ignore[attr-defined]  # likewise


def _is_text(node: nodes.Node) -> bool:
    """Whether an expression is sure to give a text, if it gives anything."""
    if isinstance(node, nodes.Add):
        return _is_text(node.left) or _is_text(node.right)
    return isinstance(node, nodes.Const) and isinstance(node.value, str)


class Sandbox(ImmutableSandboxedEnvironment):
    """Gives templates what `ImmutableSandboxedEnvironment` gives them, but no texts that fill memory.

    Attributes:
        checked: called with sums that are no short texts.
        joined: called with the many parts of a `~`.
        concat: called with the pieces of macros and of blocks that are set.
        step: called at each step of loops and macros.
    """

    code_generator_class = _CheckedCode
    intercepted_binops = frozenset({"*", "**", "%"})
    checked = staticmethod(checked)
    joined = staticmethod(joined)
    concat = staticmethod(concat)
    step = staticmethod(step)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401
        """`left * right`, `left ** right` or `left % right` in a template.

        Raises:
            SecurityError: the result would be too long.
        """
        if operator == "%":
            if isinstance(left, str):
                check_length(len(left) + printf_length(left, right))
        elif _size(operator, left, right) > MAX_PRODUCT:
            raise SecurityError(f"a chat template must not make anything as long as {operator!r} makes here")
        return super().call_binop(context, operator, left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:  # noqa: ANN401 - as the template has it
        """`obj.attribute` in a template, or `obj["attribute"]` where there is no such attribute."""
        kind = type(obj)
        if kind is dict and attribute not in _OF_DICTS:
            if attribute in obj:
                return obj[attribute]
            return self.undefined(obj=obj, name=attribute)
        if kind is str and attribute in _OF_STRINGS:
            return getattr(obj, attribute)
        if kind is str and attribute in BOUNDED_METHODS:
            return bounded_method(obj, attribute, super().getattr(obj, attribute))
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
