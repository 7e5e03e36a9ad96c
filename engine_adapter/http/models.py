"""Reads what an engine says of its models at `/v1/models`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine_adapter.errors import EngineUnavailable

# Fields of a model's card that kvpin sets itself, or that differ each time. A `root` may be a path.
_NOT_THE_ENGINES = frozenset({"id", "object", "created", "owned_by", "root", "parent", "permission"})


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The base model of an engine.

    Attributes:
        max_model_len: its context in tokens, None if the engine does not say.
        root: directory or hub id, None if the engine does not say.
        card: the engine's own fields of it, without those that kvpin sets itself.
        loras: names of the LoRA adapters beside it.
        lora_paths: where the engine read each of them from, as far as it says.
        others: names of the other base models: more names of this one, or LoRA adapters of an engine that
            names no parents.
    """

    name: str
    max_model_len: int | None
    root: str | None
    card: Mapping[str, Any] = field(repr=False)
    loras: frozenset[str]
    lora_paths: Mapping[str, str]
    others: frozenset[str] = frozenset()


def read_models(answer: object, wanted: str | None = None) -> ServedModel:
    """The base model named `wanted`, or the first base model if there is none of that name.

    Raises:
        EngineUnavailable: the answer names no base model.
    """
    match answer:
        case {"data": [*entries]}:
            named = [each for each in entries if isinstance(each, dict) and isinstance(each.get("id"), str)]
        case _:
            named = []
    bases = [each for each in named if each.get("parent") is None]
    if not bases:
        raise EngineUnavailable("/v1/models names no model")
    adapters = [each for each in named if each.get("parent") is not None]
    base = next((each for each in bases if each["id"] == wanted), bases[0])
    length, root = base.get("max_model_len"), base.get("root")
    return ServedModel(
        name=base["id"],
        max_model_len=length if isinstance(length, int) else None,
        root=root if isinstance(root, str) else None,
        card={name: value for name, value in base.items() if name not in _NOT_THE_ENGINES},
        loras=frozenset(each["id"] for each in adapters),
        lora_paths={each["id"]: each["root"] for each in adapters if isinstance(each.get("root"), str)},
        others=frozenset(each["id"] for each in bases) - {base["id"]},
    )
