"""What the admin API takes. An unknown field is an error that names it."""

from __future__ import annotations

from itertools import chain
from typing import Annotated, Literal

import msgspec

from engine_adapter import ENGINE_OPTIONS
from proxy.control.pinning import MAX_TTL_S
from proxy.control.targets import Name, Target
from proxy.settings import EngineSettings

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


_COMMON = [name for name in EngineSettings.model_fields if name not in ("kind", "url")]
_OPTIONS = sorted({*chain.from_iterable(ENGINE_OPTIONS.values())})
AddEngine: type[msgspec.Struct] = msgspec.defstruct(
    "AddEngine",
    [
        ("kind", Name),
        ("url", Name),
        *((name, Name | int | dict[str, str] | None, None) for name in (*_COMMON, *_OPTIONS)),
    ],
    namespace={"__doc__": "An engine, described as `--engine` does; its kind has only some of the options."},
    forbid_unknown_fields=True,
    kw_only=True,
)


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
