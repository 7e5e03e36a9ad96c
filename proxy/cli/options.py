"""Options as fields of a dataclass: declared once, and one argument of each command that has them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints

_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer takes it: an argument whose type is a dataclass becomes the options that the
    dataclass declares, in its place."""
    arguments = inspect.signature(command, eval_str=True).parameters.values()
    groups, parameters = dict[str, Any](), list[inspect.Parameter]()
    for each in arguments:
        if is_dataclass(each.annotation):
            groups[each.name] = each.annotation
            parameters += _options_of(each.annotation)
        else:
            parameters.append(each.replace(kind=_KEYWORD))

    @wraps(command)
    def run(**given: Any) -> None:  # noqa: ANN401 - typer passes what it parsed
        for name, kind in groups.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        command(**given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _options_of(kind: Any) -> list[inspect.Parameter]:  # noqa: ANN401 - a dataclass
    hints = get_type_hints(kind, include_extras=True)
    return [
        inspect.Parameter(each.name, _KEYWORD, default=each.default, annotation=hints[each.name])
        for each in fields(kind)
    ]
