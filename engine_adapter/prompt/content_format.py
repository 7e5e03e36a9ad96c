"""Finds out whether a chat template reads a message's content as text or as a list of parts.

Templates do not declare it. Engines infer it: a template that loops over a message's content takes parts. The
rules are those of vLLM's automatic detection, so that both render a list of parts in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from jinja2 import TemplateError, nodes

from engine_adapter.prompt.template_input import ContentFormat
from engine_adapter.prompt.templates import environment


@lru_cache(maxsize=64)
def content_format(template: str) -> ContentFormat:
    """The format of `template`; STRING for one that does not parse, as rendering it reports the error."""
    try:
        root = environment.parse(template)
    except TemplateError:
        return ContentFormat.STRING
    return ContentFormat.PARTS if any(_content_loops(root)) else ContentFormat.STRING


def looped(template: str) -> Iterator[str]:
    """What a template's loops go over, as `name` or `name.key`; nothing of one that does not parse."""
    try:
        root = environment.parse(template)
    except TemplateError:
        return
    yield from filter(None, (_source(loop.iter) for loop in root.find_all(nodes.For)))


def _content_loops(root: nodes.Template) -> Iterator[nodes.For]:
    """Loops over a message's content, directly, through the name `content`, or inside a macro."""
    messages = _aliases(root, "messages")
    items = {_name(loop.target) for loop in root.find_all(nodes.For) if _source(loop.iter) in messages}
    contents = {f"{item}.content" for item in items if item}
    in_macros: set[int] = set()
    for macro in root.find_all(nodes.Macro):
        bound = _parameters_bound_to(root, macro, contents)
        for loop in macro.find_all(nodes.For):
            in_macros.add(id(loop))
            if _source(loop.iter) in bound:
                yield loop
    for loop in root.find_all(nodes.For):
        source = _source(loop.iter)
        if source in contents or (source == "content" and id(loop) not in in_macros):
            yield loop


def _aliases(root: nodes.Template, name: str) -> set[str]:
    """`name`, and every variable assigned from it, directly or through others."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        current = waiting.pop()
        found.add(current)
        targets = (_name(a.target) for a in root.find_all(nodes.Assign) if _source(a.node) == current)
        waiting.extend(target for target in targets if target and target not in found)
    return found


def _parameters_bound_to(root: nodes.Template, macro: nodes.Macro, sources: set[str]) -> set[str]:
    """The parameters of `macro` that any call sets to one of `sources`."""
    names = [arg.name for arg in macro.args]
    bound: set[str] = set()
    for call in root.find_all(nodes.Call):
        if _name(call.node) != macro.name:
            continue
        bound.update(name for name, arg in zip(names, call.args, strict=False) if _source(arg) in sources)
        bound.update(kwarg.key for kwarg in call.kwargs if _source(kwarg.value) in sources)
    return bound


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
