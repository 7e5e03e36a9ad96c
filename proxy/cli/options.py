"""Options as fields of a dataclass: declared once, and one argument of each command that has them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import field, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def option(value: str | None, text: str, default: Any = None, *names: str, **more: Any) -> Any:  # noqa: ANN401 - of any type
    """A field that is an option: the word for its value and its help; else as `typer.Option` takes it."""
    return field(default=default, metadata={"option": typer.Option(*names, metavar=value, help=text, **more)})


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
        inspect.Parameter(
            each.name,
            _KEYWORD,
            default=each.default,
            annotation=Annotated[hints[each.name], each.metadata["option"]],
        )
        for each in fields(kind)
    ]
