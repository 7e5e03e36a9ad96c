"""What each kind of engine declares beside its adapter: settings of its own, and routes beside `/v1`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from pydantic import ByteSize, TypeAdapter, ValidationError

from engine_adapter.errors import EngineSpecError

# --- options --------------------------------------------------------------------------------------------
# Settings that only one kind of engine has, each declared beside its adapter; and errors in plain English.


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every kind's options, and the options of a kind that has none."""

    @property
    def rank(self) -> int | None:
        """The data-parallel rank of its server that the engine is; None for the whole server."""
        return None


class Size(int):
    """A number of bytes above 0. The operator may write a unit: `4GiB`."""


class OptionError(EngineSpecError):
    """An option that the kind does not have, or a value it does not take. `param`: the option; None when
    several contradict each other."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


_Options = TypeVar("_Options", bound=EngineOptions)
# A size as text. ByteSize itself ignores a second point, and text after the unit.
SIZE = re.compile(r"\s*(\d*\.)?\d+\s*[A-Za-z]*\s*")
_read_size = TypeAdapter(ByteSize).validate_python

# msgspec's words about a value, and ours.
_EXPECTED = re.compile(r"^Expected `(?P<kinds>[^`]+)`(?:, got `[^`]+`)?(?P<bound>[^`]*)")
_KINDS = {
    "int": "a whole number", "float": "a number", "str": "text", "bool": "true or false", "array": "a list",
    "object": "an object", "null": "null", "bytes": "bytes",
}  # fmt: skip
_CUT = "Input data was truncated"
# msgspec's messages about a time.
_NO_TIME = re.compile(r"^(?:Invalid RFC3339 encoded datetime|Expected `datetime` with a timezone component)")
_A_TIME = "must be a time with its zone, as 2027-01-31T00:00:00Z"
_BOUNDS = {
    " > ": " above ",
    " >= ": " of at least ",
    " < ": " below ",
    " <= ": " of at most ",
    " of length >= ": " with a length of at least ",
    " of length <= ": " with a length of at most ",
}
_ZERO = re.compile(r"(?<=[0-9])[.]0(?![0-9])")
# A pattern that only one word fits.
_ONE_WORD = re.compile(r"text matching regex '\^(\w+)\$'")
_BOUND = re.compile(r"^( of length)? [<>]=? ")


def read_options(kind: str, options: type[_Options], values: Mapping[str, object]) -> _Options:
    """Reads what the operator wrote for an engine of `kind` as its `options`. Text stands for numbers, too.
    Raises OptionError, which says which option is wrong and why, and does not repeat its value."""
    known = options.__struct_fields__
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known) or 'none'}"
            raise OptionError(f"{kind} engines have no option {name!r}; {hint}", param=name)
    try:
        return msgspec.convert(values, options, strict=False, dec_hook=_read)
    except msgspec.ValidationError as error:
        message, _, path = plain_error(str(error)).partition(" - at `$.")
        message = message[:1].lower() + message[1:]
        param = path.rstrip("`") or None
        raise OptionError(f"{param}: {message}" if param else message, param=param) from None


def _read(kind: type, value: object) -> Any:  # noqa: ANN401 - msgspec's signature
    """`Size`, the one type of an option that msgspec does not know."""
    try:
        size = kind(_read_size(value if not isinstance(value, str) or SIZE.fullmatch(value) else ""))
    except ValidationError:
        raise ValueError("expected a number of bytes, or one with a unit such as 4GiB") from None
    if size <= 0:
        raise ValueError("a size must be above 0")
    return size


def plain_error(message: str) -> str:
    """The message of a `msgspec.DecodeError`; what follows in it, the place of the value, stays."""
    if message == _CUT:
        return "it ends too early"
    if _NO_TIME.match(message):
        return _NO_TIME.sub(_A_TIME, message)
    found = _EXPECTED.match(message)
    if found is None:
        return message
    kinds = [_KINDS.get(kind, kind) for kind in found["kinds"].split(" | ") if kind != "null"] or ["null"]
    bound = _BOUND.sub(lambda sign: _BOUNDS[sign[0]], found["bound"])
    told = _ONE_WORD.sub(r"\1", f"{' or '.join(kinds)}{_ZERO.sub('', bound)}")
    return f"must be {told}{message[found.end() :]}"


# --- routes ---------------------------------------------------------------------------------------------
# Routes beside `/v1`, and WebSockets, that an engine offers its clients. Each adapter declares its own.
#
# A declared route changes nothing for other clients of the engine. An engine's other routes beside `/v1`, and
# its other WebSockets, cannot be reached through kvpin. A declared route needs a line in
# `proxy/request/known_routes.py`, or several tenants cannot use it.


@dataclass(frozen=True, slots=True)
class PromptFields:
    """The fields of a body that make a completion's prompt.

    Attributes:
        text: the field with a text.
        ids: the field with token ids; it wins over `text`, and may be the same.
        unless: with one of these fields, only the engine knows the prompt.
    """

    text: str
    ids: str
    unless: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class NativeRoute:
    """A route beside `/v1`.

    Attributes:
        same_as: the `/v1` route that does the same; a request is sent to that one.
        prompt: the fields of the prompt; None if the route runs none, or kvpin does not follow it.
        runs: whether it goes on from a prompt, which has a KV cache.
        lists: to a list of prompts (where `prompt` names fields), or for several choices (`n`, `n_cmpl`), it
            answers with a list: an object for each, which names its `index`, as the events of a stream do.
    """

    method: str = "POST"
    same_as: str | None = None
    prompt: PromptFields | None = None
    runs: bool = False
    lists: bool = False


def websocket(path: str) -> str:
    """The name under which a WebSocket is declared. Plain requests to its path are another route."""
    return f"WebSocket {path}"


READ = NativeRoute("GET")
"""A route that tells something, to all clients the same."""
ASK = NativeRoute("POST")
"""A route that answers a question without a prompt that kvpin follows."""
REALTIME = websocket("/v1/realtime")
"""OpenAI's Realtime API."""
RESPONSES_SOCKET = websocket("/v1/responses")
"""The WebSocket mode of OpenAI's Responses API."""


# --- fields and headers that let a request reach into an engine, or into another request ----------------
# Routers, and engines that share a prompt's work, use them among themselves. Where several tenants share
# engines, none of them may.

OWN_IDS = frozenset({"rid", "request_id"})
"""Fields with the engine's own id of a request. Two requests with one id end each other, or mix."""
HINTS = frozenset({"kv_hints", "priority"})
"""Fields that tell an engine where KV lies, or which request to run first. Without them the answer is the
same."""
PRIVATE_FIELDS = frozenset(
    {
        "bootstrap_host", "bootstrap_pair_key", "bootstrap_port", "bootstrap_room", "custom_logit_processor",
        "data_parallel_rank", "data_parallel_rank_decode", "decode_tp_size", "disagg_prefill_dp_rank",
        "disaggregated_params", "ec_transfer_params", "kv_transfer_params", "migration_request",
        "preserve_cache", "routed_dp_rank", "session_params", "with_cache",
    }
)  # fmt: skip
"""Fields that name other servers, other sessions' KV, ranks, or code to run."""
PRIVATE_WITHIN = (("vllm_xargs",), ("sampling_params", "extra_args"))
"""Paths of the objects within a request from which vLLM reads `kv_transfer_params`, too."""
PRIVATE_HEADERS = frozenset({b"x-request-id", b"x-data-parallel-rank", b"x-correlation-id"})
"""Headers with the same meanings, in lower case."""
ADAPTER_FIELDS = frozenset({"lora", "lora_path", "lora_request"})
"""Fields that choose a LoRA adapter, whatever the request names as its model."""
