"""The request bodies of the admin API. An unknown field is an error that names it."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

import msgspec

from proxy.control.pinning import MAX_TTL_S
from proxy.control.target import Name, Target

# A request for an operation is answered when the operation ends, or after this many seconds while it runs.
WAIT_S = 10.0
# Kvpins tell each other all keys in one message of at most 64 MiB.
MAX_KEY_MODELS = 100
Wait = Annotated[float, msgspec.Meta(ge=0, le=60)]
TENANT = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z"
_LINE = r"^[^\x00-\x1f\x7f-\x9f]*\Z"
_MODEL = r"^(?=.*\S)[^\x00-\x1f\x7f-\x9f]*\Z"
# What a text must be, by its pattern: errors say this.
PATTERNS = {
    TENANT: "1 to 64 letters, digits, dots, dashes or underscores, the first a letter or digit",
    _LINE: "one line of text, without control characters",
    _MODEL: "one line of text that is not blank, without control characters",
}


class OnTarget(Target, kw_only=True):
    """A target, and how many seconds to wait for the operation's end."""

    wait_s: Wait = WAIT_S


class Flush(OnTarget):
    """The target to flush."""


class Offload(OnTarget):
    """The target to move from the GPU tier to host memory."""


class Restore(OnTarget, kw_only=True):
    """The target to move to the GPU tier.

    With `fallback`, engines that cannot restore compute a prefix again.
    """

    fallback: Literal["warm"] | None = None


class Warm(OnTarget, kw_only=True):
    """The prefix to compute. `engines: "all"` computes it on every ready engine of the model."""

    engines: Literal["all"] | None = None


class Pin(OnTarget, kw_only=True):
    """The prefix to keep, and for how many seconds."""

    ttl_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_TTL_S)] = 3600.0


class Unpin(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The pin to end."""

    pin_id: Name
    wait_s: Wait = WAIT_S


class Drain(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Sends an engine no new requests; with `undo`, sends it requests again."""

    undo: bool = False


_Count = Annotated[int, msgspec.Meta(gt=0, lt=2**53)]


class AddKey(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The key to issue: its tenant, the models that it is for (all by default), and when it ends, as
    `2027-01-31T00:00:00Z`. `name` is for people. `new_tenant` allows a tenant that nobody knows. The limits
    are those of the tenant from now on; the settings must not name it."""

    tenant: Annotated[str, msgspec.Meta(pattern=TENANT)] | None = None
    name: Annotated[str, msgspec.Meta(max_length=64, pattern=_LINE)] = ""
    models: (
        Annotated[
            tuple[Annotated[str, msgspec.Meta(max_length=256, pattern=_MODEL)], ...],
            msgspec.Meta(min_length=1, max_length=MAX_KEY_MODELS),
        ]
        | None
    ) = None
    expires: Annotated[datetime, msgspec.Meta(tz=True)] | None = None
    new_tenant: bool = False
    requests_per_minute: _Count | None = None
    tokens_per_minute: _Count | None = None
    concurrent_requests: _Count | None = None


class DryRun(msgspec.Struct, kw_only=True):
    """A request as a client would send it; `path` may name its route, and `tenant` its sender."""

    path: str | None = None
    tenant: str | None = None
    model: str | None = None


class PutTable(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A p-tuning table: base64 of safetensors bytes that hold one float tensor [rows, hidden]."""

    data: bytes
    id: Name | None = None
    extra_id: int | None = None
