"""The sandbox that chat templates run in: jinja2's, with a short way for what templates read most.

Up to two thirds of a template's time go into jinja2's checks of each `message.role` and `content.strip`. The
result is always the same for the keys of a plain dict and the methods of a plain string.
"""

from __future__ import annotations

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


class _CheckedCode(CodeGenerator):
    """jinja2's compiler, with a look at the results of `+` and `~`, and at each step of loops and macros.

    The look is written into the code, because a call would take a tenth of a template's time.
    """

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
    """

    code_generator_class = _CheckedCode
    intercepted_binops = frozenset({"*", "**", "%"})
    checked = staticmethod(checked)
    joined = staticmethod(joined)
    concat = staticmethod(concat)
    step = staticmethod(step)

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
