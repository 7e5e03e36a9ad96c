"""Finds out whether a chat template reads a message's content as text or as a list of parts.

Templates do not declare it. Engines infer it: a template that loops over a message's content takes parts. The
rules are those of vLLM's automatic detection, so that both render a list of parts in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from functools import lru_cache

from jinja2 import TemplateError, nodes

from engine_adapter.prompt.template_input import ContentFormat
from engine_adapter.prompt.templates import environment


@lru_cache(maxsize=64)
def content_format(template: str) -> ContentFormat:
    """The format of `template`; STRING for one that does not parse, as rendering it reports the error."""
    try:
        takes_parts = any(_content_loops(environment.parse(template)))
    except (TemplateError, RecursionError):
        return ContentFormat.STRING
    return ContentFormat.PARTS if takes_parts else ContentFormat.STRING


def looped(template: str) -> set[str]:
    """What a template's loops go over, as `name` or `name.key`; nothing of one that does not parse."""
    try:
        loops = [*environment.parse(template).find_all(nodes.For)]
        return {source for loop in loops if (source := _source(loop.iter))}
    except (TemplateError, RecursionError):
        return set()


def _content_loops(root: nodes.Template) -> Iterator[nodes.For]:
    """Loops over a message's content, directly, through the name `content`, or inside a macro."""
    messages, loops = _aliases(root, "messages"), [*root.find_all(nodes.For)]
    items = {_name(loop.target) for loop in loops if _source(loop.iter) in messages}
    contents = {f"{item}.content" for item in items if item}
    calls: dict[str | None, list[nodes.Call]] = {}  # by the name of what is called
    for call in root.find_all(nodes.Call):
        calls.setdefault(_name(call.node), []).append(call)
    in_macros: set[int] = set()
    for macro in root.find_all(nodes.Macro):
        bound = {name for call in calls.get(macro.name, ()) for name in _bound_by(call, macro, contents)}
        for loop in macro.find_all(nodes.For):
            in_macros.add(id(loop))
            if _source(loop.iter) in bound:
                yield loop
    for loop in loops:
        source = _source(loop.iter)
        if source in contents or (source == "content" and id(loop) not in in_macros):
            yield loop


def _aliases(root: nodes.Template, name: str) -> set[str]:
    """`name`, and every variable assigned from it, directly or through others. One walk: templates of a
    hostile model may be long."""
    named: dict[str | None, list[str]] = {}  # what is assigned → the names it gets
    for each in root.find_all(nodes.Assign):
        if target := _name(each.target):
            named.setdefault(_source(each.node), []).append(target)
    found, waiting = set[str](), [name]
    while waiting:
        found.add(current := waiting.pop())
        waiting += named.pop(current, ())
    return found


def _bound_by(call: nodes.Call, macro: nodes.Macro, sources: AbstractSet[str]) -> Iterator[str]:
    """The parameters of `macro` that a call sets to one of `sources`."""
    given = [(param.name, arg) for param, arg in zip(macro.args, call.args, strict=False)]
    given += [(kwarg.key, kwarg.value) for kwarg in call.kwargs]
    return (name for name, arg in given if _source(arg) in sources)


def _name(node: nodes.Node) -> str | None:
    return node.name if isinstance(node, nodes.Name) else None


def _source(node: nodes.Node | None) -> str | None:
    """The `name` or `name.key` that an expression reads; filters, tests and slices are ignored."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if isinstance(node, nodes.Name):
        return node.name
    if isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name):
        return f"{node.node.name}.{node.attr}"
    if isinstance(node, nodes.Getitem) and isinstance(node.node, nodes.Name):
        key = node.arg.value if isinstance(node.arg, nodes.Const) else None
        return f"{node.node.name}.{key}" if isinstance(key, str) else None
    return None
