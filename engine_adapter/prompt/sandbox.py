"""The sandbox that chat templates run in: jinja2's, with a short way for what templates read most.

Up to two thirds of a template's time go into jinja2's checks of each `message.role` and `content.strip`. The
result is always the same for the keys of a plain dict and the methods of a plain string.
"""

from __future__ import annotations

from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

_OF_DICTS = frozenset(dir(dict))
# jinja2 replaces the two that could reach into objects; a name with an underscore is private.
_OF_STRINGS = frozenset(name for name in dir(str) if not name.startswith(("_", "format")))


class Sandbox(ImmutableSandboxedEnvironment):
    """Gives templates what `ImmutableSandboxedEnvironment` gives them."""

    def getattr(self, obj: Any, attribute: str) -> Any:  # noqa: ANN401 - as the template has it
        """`obj.attribute` in a template, or `obj["attribute"]` where there is no such attribute."""
        kind = type(obj)
        if kind is dict and attribute not in _OF_DICTS:
            if attribute in obj:
                return obj[attribute]
            return self.undefined(obj=obj, name=attribute)
        if kind is str and attribute in _OF_STRINGS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)
