"""Request bodies, checked field by field.

Unknown fields are ignored, as they may be meant for another engine. Known fields that this engine cannot
honour (best_of, suffix …) are refused, unless their value asks for nothing.
"""

from __future__ import annotations

import contextlib
import math
import re
from array import array
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from engine_adapter.errors import ChatError, EngineUnavailable, FieldError, PromptTableError
from engine_adapter.options import plain_error
from engine_adapter.prompt.extra_ids import UINT64_MAX
from engine_adapter.torch_engine.requests import PinLimitReached, RequestFailed, SamplingParams
from engine_adapter.types import KvTarget, Retention, TokenIds, extra_array

# --- errors in OpenAI's shape, bodies up to a limit, JSON responses -------------------------------------

_TYPES = {
    404: "not_found_error",
    409: "conflict_error",
    413: "invalid_request_error",
    500: "server_error",
    503: "service_unavailable_error",
}

# Codes of errors that have no code of their own.
_CODES = {400: "invalid_value", 404: "not_found", 405: "method_not_allowed", 501: "not_supported"}

_HEADERS = {
    413: {"connection": "close"},  # the body was not read to its end
    500: {"x-should-retry": "false"},  # this request failed, and would fail on another engine too
    503: {"retry-after": "1"},
}


class ApiError(Exception):
    """An error to answer the client with."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param  # the request field at fault, None where none is
        # Short name for programs, e.g. `context_length_exceeded`; None takes that of the status.
        self.code = code


# Other errors that a client is told of: their status and code.
_KNOWN: dict[type[Exception], tuple[int, str | None]] = {
    ChatError: (400, "invalid_messages"),
    PromptTableError: (400, "invalid_embeddings"),
    FieldError: (400, None),
    PinLimitReached: (409, "pin_limit_reached"),
    RequestFailed: (500, "request_failed"),
    EngineUnavailable: (503, "engine_unavailable"),
}


def as_api_error(error: Exception) -> ApiError | None:
    """The client's view of `error`; None when it is a bug of ours."""
    if isinstance(error, ApiError):
        return error
    for kind, (status, code) in _KNOWN.items():
        if isinstance(error, kind):
            return ApiError(str(error), status=status, param=getattr(error, "param", None), code=code)
    return None


def error_body(error: ApiError) -> dict[str, Any]:
    """`{"error": {"message", "type", "param", "code"}}`."""
    return {
        "error": {
            "message": str(error),
            "type": _TYPES.get(error.status, "invalid_request_error"),
            "param": error.param,
            "code": error.code or _CODES.get(error.status),
        }
    }


def error_response(error: ApiError) -> Response:
    """`error` as a response."""
    return json_response(error_body(error), status=error.status, headers=_HEADERS.get(error.status))


def json_response(content: object, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON response."""
    return Response(
        msgspec.json.encode(content), status_code=status, media_type="application/json", headers=headers
    )


async def body_of(request: Request) -> bytes:
    """The whole body; raises ApiError (413) beyond the engine's limit."""
    return await read_body(request.scope, request.receive, request.app.state.max_body_bytes)


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole body. Raises ApiError (413) for more than `limit` bytes, of which at most `limit` are held,
    and ClientDisconnect if the client left before its request was complete."""
    declared = Headers(scope=scope).get("content-length", "")
    is_larger = declared.isascii() and declared.isdigit() and int(declared[:20]) > limit
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > limit or is_larger:
            is_larger = True
            parts.clear()
        else:
            parts.append(part)
        is_last = not message.get("more_body", False)
        # Closing while the client still sends would reset the connection and lose the answer. So a body up
        # to twice the limit is read to its end.
        if is_larger and (is_last or size > 2 * limit):
            raise ApiError(f"the body is larger than {limit} bytes", status=413, code="content_too_large")
        if is_last:
            return b"".join(parts)


MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 128
"""As at OpenAI."""
MAX_STOP = 1000
"""Most characters of a stop string: each token is compared with all its beginnings."""
MAX_INPUTS = 2048
"""Most texts of a request for embeddings; as at OpenAI."""
MAX_VALUES = 1_000_000
"""Most values of a body: a million small ones take 0.1 s to decode, in which nothing else runs."""
_DEFAULT_COMPLETION_TOKENS = 16
_MAX_BIAS = 100.0
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP)]
_Alternatives = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
_OWN_SPECIAL = "a chat template brings its own special tokens"
# Fields that `SamplingParams` takes as they are.
_SAMPLING_FIELDS = (
    "temperature", "top_p", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "min_tokens", "ignore_eos",
)  # fmt: skip


class StreamOptions(msgspec.Struct, frozen=True):
    """`stream_options`."""

    include_usage: bool | None = None


class _Generation(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**63 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    ignore_eos: bool | None = None
    stop: _Stop | Annotated[list[_Stop], Meta(max_length=4)] | None = None
    stop_token_ids: list[int] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    best_of: int | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json_object: Any = None
    cache_salt: str | None = None
    priority: int | None = None
    keep_priority: Annotated[int, Meta(ge=0, le=1000)] | None = None
    keep_s: Annotated[float, Meta(gt=0)] | None = None
    keep_for: str | None = None
    return_token_ids: bool | None = None
    stream_token_ids: bool | None = None
    answer_token_ids: list[int] | None = None
    add_special_tokens: bool | None = None
    prompt_table: str | None = None
    extra_ids: list[Any] | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def asked_tokens(self) -> int | None:
        """The client's token limit, None without one."""
        limit: int | None = getattr(self, self.limit_name)
        return limit

    @property
    def limit_name(self) -> str:
        return "max_tokens"

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class ChatRequest(_Generation, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`, and `/tokenize` with messages."""

    messages: Any
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = None
    modalities: list[str] | None = None
    logprobs: bool | None = None
    top_logprobs: _Alternatives | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Any = None

    @property
    def prompt_name(self) -> str:
        """The field with the prompt."""
        return "messages"

    @property
    def limit_name(self) -> str:
        """The field that limits the answer. The newer one wins."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


class CompletionRequest(_Generation, frozen=True, kw_only=True):
    """`POST /v1/completions`, and `/tokenize` with a prompt."""

    prompt: str | list[Any] | None = None
    logprobs: _Alternatives | None = None
    echo: bool | None = None
    suffix: str | None = None
    prompt_embeds: Any = None

    @property
    def prompt_name(self) -> str:
        """The field with the prompt."""
        return "prompt_embeds" if self.prompt_embeds else "prompt"


PromptRequest = ChatRequest | CompletionRequest


class EmbeddingRequest(msgspec.Struct, frozen=True):
    """`POST /v1/embeddings`."""

    input: str | list[Any]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True):
    """`POST /detokenize`."""

    tokens: list[int]


class SliceRequest(msgspec.Struct, frozen=True):
    """`POST /kv/flush|offload|restore`."""

    token_ids: list[int] | None = None
    extra_ids: list[int] | None = None
    cache_salt: str | None = None
    max_blocks: Annotated[int, Meta(ge=1, le=65_536)] = 256


class PinRequest(msgspec.Struct, frozen=True):
    """`POST /kv/pin`."""

    token_ids: list[int]
    ttl_s: Annotated[float, Meta(gt=0)]
    extra_ids: list[int] | None = None
    cache_salt: str | None = None


class UnpinRequest(msgspec.Struct, frozen=True):
    """`POST /kv/unpin`."""

    pin_id: str


class _Prompt(msgspec.Struct, frozen=True):
    messages: msgspec.Raw = msgspec.Raw(b"")


# msgspec names no key of an object whose values have one type.
_EACH = "[...]"

AnyRequest = TypeVar("AnyRequest", bound=msgspec.Struct)


def parse(body: bytes, kind: type[AnyRequest]) -> AnyRequest:
    """Reads a body; raises ApiError (400) that names the field at fault."""
    if not body:
        raise ApiError("the body is empty: send a JSON object", code="invalid_json")
    values = body.count(b",")
    if values > MAX_VALUES:
        raise ApiError(f"the body has about {values} values; at most {MAX_VALUES} are taken")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        path = path.rstrip("`").removeprefix(".")
        if missing := re.fullmatch(r"Object missing required field `(\w+)`", message):
            param = f"{path}.{missing[1]}" if path else missing[1]
            raise ApiError(f"{param} is missing", param=param) from error
        param = path.removesuffix(_EACH)
        each = "each value " if path.endswith(_EACH) else ""
        reason = _range_of(kind, param) if "<= " in message or ">= " in message else None
        reason = reason or plain_error(message)
        where = f"{param or 'the body'}: {each}"
        raise ApiError(where + reason[:1].lower() + reason[1:], param=param or None) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        fault = f"the body is not valid JSON: {plain_error(str(error))}"
        raise ApiError(fault, code="invalid_json") from error
    except RecursionError as error:
        raise ApiError("the body is nested too deeply", code="invalid_json") from error


def _range_of(kind: type[msgspec.Struct], name: str) -> str | None:
    """What a number must be that has two bounds, of which msgspec names one; None for other fields."""
    fields = getattr(msgspec.inspect.type_info(kind), "fields", ())
    types = next((getattr(field.type, "types", ()) for field in fields if field.name == name), ())
    for each in types:
        if isinstance(each, msgspec.inspect.FloatType) and None not in (each.ge, each.le):
            return f"must be a number from {each.ge:g} to {each.le:g}"
    return None


def parse_tokenize(body: bytes) -> PromptRequest:
    """Reads a `/tokenize` body: that of a chat or of a completion."""
    if parse(body, _Prompt).messages:
        return parse(body, ChatRequest)
    return parse(body, CompletionRequest)


def sampling_of(request: PromptRequest, *, default_max_tokens: int | None) -> SamplingParams:
    """Checked sampling parameters. `default_max_tokens`: the limit of a chat that names none; None for as
    many as fit. Raises ApiError (400) for values that exclude each other or a feature this engine lacks."""
    _check_supported(request)
    default = default_max_tokens if isinstance(request, ChatRequest) else _DEFAULT_COMPLETION_TOKENS
    max_tokens = default if request.asked_tokens is None else request.asked_tokens
    echoes = isinstance(request, CompletionRequest) and bool(request.echo)
    if max_tokens is not None:
        least = 0 if echoes else 1
        _need(max_tokens >= least, request.limit_name, f"be at least {least}")
        _need((request.min_tokens or 0) <= max_tokens, "min_tokens", f"be at most {request.limit_name}")
    given = {name: getattr(request, name) for name in _SAMPLING_FIELDS}
    return SamplingParams(
        **{name: value for name, value in given.items() if value is not None},
        top_k=max(request.top_k or 0, 0),
        max_tokens=max_tokens,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        logprobs=_logprobs(request),
        prompt_logprobs=_logprobs(request) if echoes else None,
        logit_bias=_bias(request),
    )


def choices_of(request: PromptRequest) -> int:
    """The number of choices that the request asks for; raises ApiError (400)."""
    n = 1 if request.n is None else request.n
    if request.best_of not in (None, 1, n):
        raise ApiError("best_of above n is not supported", param="best_of")
    for name in ("answer_token_ids", "stream_token_ids"):
        if n > 1 and getattr(request, name):
            raise ApiError(f"{name} needs n = 1", param=name)
    return n


def embeds_of(request: CompletionRequest) -> object:
    """The one value in `prompt_embeds`, which is all of the prompt then; None for a prompt of tokens. Raises
    ApiError (400) beside another prompt. An empty `prompt` is none: some clients cannot leave it out."""
    given = request.prompt_embeds
    if given is None or given == []:
        return None
    if isinstance(given, list):
        if len(given) > 1:
            raise _several("prompt_embeds")
        given = given[0]
    if request.prompt:
        raise ApiError("prompt and prompt_embeds are two prompts; send one request for each", param="prompt")
    for name in ("prompt_table", "extra_ids"):
        if getattr(request, name) is not None:
            raise ApiError(f"{name} and prompt_embeds exclude each other", param=name)
    return given


def prompt_of(prompt: str | list[Any] | None) -> str | TokenIds[int]:
    """The prompt of a completion: text or token ids; raises ApiError (400)."""
    if prompt is None:
        raise ApiError("prompt is missing", param="prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if not prompt:
        raise ApiError("prompt is empty", param="prompt")
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt[0], (str, list)):
        raise _several("prompt")
    return token_ids_of(prompt, "prompt")


def inputs_of(request: EmbeddingRequest) -> dict[str, str | TokenIds[int]]:
    """The texts and lists of token ids to embed, by the names of their fields; raises ApiError (400)."""
    named: dict[str, Any] = {"input": request.input}
    if isinstance(request.input, list) and request.input and isinstance(request.input[0], (str, list)):
        named = {f"input[{index}]": each for index, each in enumerate(request.input)}
    if len(named) > MAX_INPUTS:
        raise ApiError(f"input has {len(named)} entries; at most {MAX_INPUTS} are taken", param="input")
    for name, each in named.items():
        if not isinstance(each, (str, list)):
            raise ApiError(f"{name} is neither a text nor a list of token ids", param=name)
        if not each:
            raise ApiError(f"{name} is empty", param=name)
    return {name: each if isinstance(each, str) else token_ids_of(each, name) for name, each in named.items()}


def _several(param: str) -> ApiError:
    return ApiError(f"{param} holds several prompts; send one request for each", param=param)


def token_ids_of(values: list[Any], param: str) -> TokenIds[int]:
    """`values` as int32; raises ApiError (400) with the index of the first that is no token id."""
    if set(map(type, values)) <= {int}:
        with contextlib.suppress(OverflowError):
            return array("i", values)
    index = next(i for i, v in enumerate(values) if type(v) is not int or not -(2**31) <= v < 2**31)
    raise ApiError(f"{param}[{index}] is not a token id", param=f"{param}[{index}]")


def salt_of(salt: str | None) -> str | None:
    """A checked cache salt; raises ApiError (400) for an empty one."""
    if salt == "":
        raise ApiError("cache_salt is empty; leave it out to share KV without a salt", param="cache_salt")
    return salt


def answered_of(request: PromptRequest, sampling: SamplingParams) -> TokenIds[int]:
    """The beginning of the answer, with which the engine goes on. Raises ApiError (400) for ids that are
    none, and if no token is left to generate."""
    answered = token_ids_of(request.answer_token_ids or [], "answer_token_ids")
    limit = sampling.max_tokens
    rule = f"have less than {request.limit_name} tokens"
    _need(limit is None or not answered or len(answered) < limit, "answer_token_ids", rule)
    return answered


def retention_of(request: PromptRequest) -> Retention:
    """The retention a request asks for, with priority 0 for none. `keep_priority` alone retains without an
    end. `keep_s` alone means priority 1."""
    priority = int(request.keep_s is not None) if request.keep_priority is None else request.keep_priority
    ttl_s = math.inf if request.keep_s is None else request.keep_s
    return Retention(priority, ttl_s, request.keep_for)


def target_of(request: SliceRequest | PinRequest) -> KvTarget:
    """The target of a KV operation; raises ApiError (400)."""
    if request.token_ids is None:
        if request.extra_ids is not None:
            raise ApiError("extra_ids need token_ids, which are missing", param="extra_ids")
        return KvTarget(cache_salt=salt_of(request.cache_salt))
    token_ids = token_ids_of(request.token_ids, "token_ids")
    extra_ids = None
    if request.extra_ids is not None and any(request.extra_ids):
        if len(request.extra_ids) != len(token_ids):
            counts = f"extra_ids has {len(request.extra_ids)} entries for {len(token_ids)} token ids"
            raise ApiError(counts, param="extra_ids")
        for index, value in enumerate(request.extra_ids):
            _need(0 <= value <= UINT64_MAX, f"extra_ids[{index}]", "be within uint64")
        extra_ids = extra_array(request.extra_ids)
    return KvTarget(token_ids, extra_ids, salt_of(request.cache_salt))


def _need(holds: bool, param: str, rule: str) -> None:
    if not holds:
        raise ApiError(f"{param} must {rule}", param=param)


def _logprobs(request: PromptRequest) -> int | None:
    """Number of alternatives per token, None for no logprobs."""
    if isinstance(request, CompletionRequest):
        return request.logprobs
    top = request.top_logprobs or 0
    if top and not request.logprobs:
        raise ApiError("top_logprobs needs logprobs to be true", param="top_logprobs")
    return top if request.logprobs else None


def _bias(request: PromptRequest) -> tuple[tuple[int, float], ...]:
    """The bias of each token; raises ApiError (400)."""
    biases: dict[int, float] = {}
    for token, bias in (request.logit_bias or {}).items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):  # noqa: PLR2004 - fits int32
            raise ApiError(f"logit_bias: {token[:40]!r} is not a token id", param="logit_bias")
        _need(-_MAX_BIAS <= bias <= _MAX_BIAS, "logit_bias", f"be from {-_MAX_BIAS:g} to {_MAX_BIAS:g}")
        biases[int(token)] = bias
    return tuple(biases.items())


def _check_supported(request: PromptRequest) -> None:
    """Refuses fields that the engine would otherwise silently ignore."""
    refused: dict[str, tuple[object, str]]
    if isinstance(request, CompletionRequest):
        refused = {"suffix": (request.suffix, "suffix is not supported")}
    else:
        refused = {
            "modalities": (set(request.modalities or ()) - {"text"}, "this engine makes text only"),
            "prompt_table": (request.prompt_table is not None, "prompt_table needs /v1/completions"),
            "extra_ids": (request.extra_ids is not None, "extra_ids need /v1/completions"),
            "add_special_tokens": (request.add_special_tokens, _OWN_SPECIAL),
        }
    for param, (is_asked, message) in refused.items():
        if is_asked:
            raise ApiError(message, param=param)
