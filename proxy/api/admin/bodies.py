"""What the admin API takes. An unknown field is an error that names it."""

from __future__ import annotations

from itertools import chain
from typing import Annotated, Literal

import msgspec

from engine_adapter import ENGINE_OPTIONS
from proxy.control.pinning import MAX_TTL_S
from proxy.control.targets import Name, Target

# How long a request for an operation waits for its end before it is answered with the running operation.
WAIT_S = 10.0
Wait = Annotated[float, msgspec.Meta(ge=0, le=60)]


class Flush(Target, kw_only=True):
    """A target, and seconds to wait for the end."""

    wait_s: Wait = WAIT_S


class Offload(Target, kw_only=True):
    """A target, and seconds to wait for the end."""

    wait_s: Wait = WAIT_S


class Restore(Target, kw_only=True):
    """A target; `fallback` computes a prefix again on engines that cannot restore."""

    fallback: Literal["warm"] | None = None
    wait_s: Wait = WAIT_S


class Warm(Target, kw_only=True):
    """A prefix; `engines: "all"` warms every ready engine of the model."""

    engines: Literal["all"] | None = None
    wait_s: Wait = WAIT_S


class Pin(Target, kw_only=True):
    """A prefix, and how many seconds it is kept."""

    ttl_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_TTL_S)] = 3600.0
    wait_s: Wait = WAIT_S


class Unpin(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The pin to end."""

    pin_id: Name
    wait_s: Wait = WAIT_S


class _AddEngine(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """An engine, described as `--engine` does."""

    kind: Name
    url: Name
    id: Name | None = None
    model: Name | None = None
    tokenizer: Name | None = None
    api_key: Name | None = None
    headers: dict[str, str] | Name | None = None
    ca: Name | None = None
    cert: Name | None = None
    key: Name | None = None


AddEngine: type[msgspec.Struct] = msgspec.defstruct(
    "AddEngine",
    [(name, str | int | None, None) for name in sorted({*chain.from_iterable(ENGINE_OPTIONS.values())})],
    bases=(_AddEngine,),
    forbid_unknown_fields=True,
    kw_only=True,
)
"""With the options of every kind; those of its own are checked with the engine."""


class Drain(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Drain an engine, or with `undo` let it take requests again."""

    undo: bool = False


class DryRun(msgspec.Struct, kw_only=True):
    """A data-plane request; beside its own fields, its route and who would send it."""

    path: str | None = None
    tenant: str | None = None
    model: str | None = None


class PutTable(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A p-tuning table: base64 of safetensors bytes that hold one float tensor [rows, hidden]."""

    data: bytes
    id: Name | None = None
    extra_id: int | None = None
