"""A request as trtllm-serve gets it: its fields, and the two phases of one that two servers divide."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from typing_extensions import override

from engine_adapter.body import UNREADABLE, JsonBody
from engine_adapter.errors import EngineGarbled, EngineRejected
from engine_adapter.hold import Handover, Transfer
from engine_adapter.http.answer_fields import NULL, read_answer_usage
from engine_adapter.types import KvTarget, TokenIds

# --- decides which request fields go to the server, and how its chat template gets tools ----------------
# trtllm-serve refuses a request with an unknown field. So kvpin removes unknown fields that cannot change the
# answer. Fields that can change it stay, and the server refuses them. A cache salt is never removed from a
# request that runs a prompt, because the request could then reuse another tenant's KV.

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = "/v1/messages"
PROMPT_ROUTES = frozenset({CHAT, COMPLETIONS, RESPONSES, MESSAGES})
SALT = "cache_salt"
# Fields of other engines, gateways and OpenAI that cannot change an answer: routing, priority, user,
# metadata.
HINTS = frozenset(
    {
        "cache_namespace", "conversation_params", "metadata", "nvext", "prediction", "priority",
        "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "request_id", "rid",
        "safety_identifier", "service_tier", "session_id", "store", "user",
    }
)  # fmt: skip
# The hints and the fields of kvpin's own that versions 1.2 to 1.4 take, for servers that do not list their
# fields.
KNOWN: Mapping[str, frozenset[str]] = {
    CHAT: frozenset({"conversation_params", "priority", "user", SALT, "prompt_token_ids"}),
    COMPLETIONS: frozenset({"conversation_params", "priority", "user"}),
}
# With these, the server does more with a text than tokenise it.
_MORE_THAN_TOKENS = ("prompt_token_ids", "echo", "truncate_prompt_tokens", "documents", "mm_processor_kwargs")


class RequestFields:
    """The request fields that each route of a server takes. `numbers_phases`: the two phases of a divided
    request can have a number, by which KV is asked for."""

    def __init__(self, openapi: object = None) -> None:
        """`openapi` is the server's description of its routes, if it gives one."""
        params = look_up(openapi, "components", "schemas", "DisaggregatedParams", "properties")
        self.numbers_phases = not isinstance(params, dict) or "disagg_request_id" in params
        described = {path: accepted_fields(openapi, path) for path in PROMPT_ROUTES}
        self._accepted = {**KNOWN, **{path: names for path, names in described.items() if names is not None}}

    def accepts(self, path: str, name: str) -> bool:
        """True if the route is known to take the field."""
        return name in self._accepted.get(path, ())

    def droppable(self, path: str, body: JsonBody) -> list[str]:
        """Fields of a body to remove, sorted; none for an unknown route."""
        accepted = self._accepted.get(path)
        unknown = [] if accepted is None else [n for n in sorted(HINTS) if n in body and n not in accepted]
        if SALT in body and (body.get(SALT) is None or path not in PROMPT_ROUTES):
            unknown.append(SALT)  # it salts nothing that stays in the cache
        return unknown

    def check_salt(self, path: str, body: JsonBody) -> None:
        """Raises EngineRejected (400) if the route would run a salted prompt unsalted."""
        salted = path in PROMPT_ROUTES and body.get(SALT) is not None
        if salted and not self.accepts(path, SALT):
            raise EngineRejected(
                f"TensorRT-LLM takes no cache_salt at {path}, and without it KV would be shared beyond "
                f"the tenant: send the request to {CHAT}, which takes it",
                status=400,
                param=SALT,
            )

    def as_token_ids(self, path: str, body: JsonBody, prompt: KvTarget | None) -> dict[str, Any]:
        """The changes that give the server token ids instead of text; {} where it must tokenise itself."""
        if prompt is None or not prompt.exact or not prompt.token_ids or prompt.extra_ids is not None:
            return {}
        if any(body.get(name) for name in _MORE_THAN_TOKENS):
            return {}
        if path == CHAT and self.accepts(CHAT, "prompt_token_ids"):
            return {"prompt_token_ids": prompt.token_ids.tolist()}
        if path == COMPLETIONS and isinstance(body.get("prompt"), str):
            return {"prompt": prompt.token_ids.tolist()}
        return {}


def accepted_fields(openapi: object, path: str) -> frozenset[str] | None:
    """Fields of the JSON body of `POST path`; None if unknown, or if any field is accepted."""
    schema = look_up(openapi, "paths", path, "post", "requestBody", "content", "application/json", "schema")
    reference = look_up(schema, "$ref")
    if isinstance(reference, str):
        schema = look_up(openapi, *reference.removeprefix("#/").split("/"))
    names = look_up(schema, "properties")
    if look_up(schema, "additionalProperties") is not False or not isinstance(names, dict):
        return None
    return frozenset(names)


def look_up(value: object, *keys: str) -> object:
    """The value under nested keys; None where one is missing."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


FUNCTION = ("name", "description", "parameters", "strict")
"""The fields of a function, for servers that do not list them. 1.2 and older have no `strict`."""


@dataclass(init=False, unsafe_hash=True)
class GivenTools:
    """The client's tools → those of the chat template: read into trtllm-serve's models and written out again.

    So every field of these models is there, in their order, with null where the client gave none: a template
    that writes tools first would share almost nothing with one that got the client's JSON."""

    fields: tuple[str, ...]

    def __init__(self, openapi: object = None) -> None:
        """`openapi` is the server's description of its routes, if it gives one."""
        listed = look_up(openapi, "components", "schemas", "FunctionDefinition", "properties")
        self.fields = tuple(listed) if isinstance(listed, dict) and listed else FUNCTION

    def __call__(self, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """A tool without a function stays: the server refuses it."""
        return [self._written(tool, tool.get("function")) for tool in tools]

    def _written(self, tool: dict[str, Any], function: object) -> dict[str, Any]:
        if not isinstance(function, dict):
            return tool
        written = {name: function.get(name) for name in self.fields}
        return {"type": tool.get("type", "function"), "function": written}


# --- context phase --------------------------------------------------------------------------------------
# KV from one trtllm-serve to another: the context phase on one, the generation phase on the other.
#
# The first leg is the request with `request_type` `context_only`: its engine computes the prompt and one
# token, whatever the request's limit, and keeps the KV. Its choice has `disaggregated_params`. The second
# leg is the request with these and `generation_only`; its engine fetches the KV by the request's number,
# and goes on after that token. So both phases of one request have the same number, and no other request has
# it: kvpin draws it.
#
# KV that is gone is never another prompt's: it is asked for by its number. The second engine then fails, or
# waits for `kv_transfer_timeout_ms`. An answer with several choices would fetch the KV several times, and one
# that is no stream would not show that its engine waits in vain. So these fetch with a request of their own.

_PARAMS, _IDS = "disaggregated_params", "prompt_token_ids"
# Engines give smaller numbers to their own requests: below 2^40, in some versions below 2^42.
_FIRST_NUMBER, _NUMBERS = 1 << 42, (1 << 63) - (1 << 42)
# With another finish reason, the first token was the last one: no KV is kept.
_GOES_ON = ("length", "not_finished")
# With these fields a request has several answers, or one that needs more than the KV and the first token.
_SEVERAL = ("n", "best_of")
_OTHERWISE = ("echo", "logprobs", "top_logprobs", "use_beam_search")
_LIMITS = ("max_tokens", "max_completion_tokens")
# The first leg lacks these options, so that its engine does not refuse others that are wrong.
_STREAM_OPTIONS = (None, {"include_usage": True})
# Fields about the answer that the request which only fetches the KV does not need.
_OF_ANSWER = (
    *_SEVERAL,
    *_OTHERWISE,
    *_LIMITS,
    "min_tokens",
    "response_format",
    "stop",
    "stop_token_ids",
    "stream_options",
)


class ContextPhase(Transfer):
    """`Transfer` between context and generation servers.

    `usable_s` is below `kv_transfer_timeout_ms` of their cache transceivers, 60 s by default."""

    name = "TensorRT-LLM context phase"
    usable_s = 55.0
    remedy = "start it with --config FILE, and in it cache_transceiver_config: {backend: DEFAULT}"
    checks_all = True

    @override
    def takes(self, route: str, body: JsonBody) -> bool:
        """Unless its client divides it itself."""
        return route in (CHAT, COMPLETIONS) and body.hint(_PARAMS) is None

    @override
    def fetch(self, route: str, body: JsonBody, token_ids: TokenIds[int]) -> tuple[str, JsonBody] | None:
        """None for a stream of one answer of several tokens. Others fetch with a request for two tokens, of
        which the second engine computes one: it keeps the prompt's blocks for the request itself."""
        is_one = all(body.hint(name) in (None, 1) for name in _SEVERAL)
        is_usual = all(body.hint(name) is None or body.hint(name) is False for name in _OTHERWISE)
        is_long = all(body.hint(name) != 1 for name in _LIMITS)
        is_checked = body.hint("stream_options") in _STREAM_OPTIONS
        if body.get("stream") is True and is_one and is_usual and is_long and is_checked:
            return None
        fields: dict[str, object] = {"stream": False, "max_tokens": 2, "ignore_eos": True}
        if route == COMPLETIONS:
            fields["prompt"] = token_ids.tolist()
        return route, body.replace(**{**dict.fromkeys(_OF_ANSWER), **fields})

    @override
    def first_leg(self, body: JsonBody) -> JsonBody:
        number = _FIRST_NUMBER + secrets.randbelow(_NUMBERS)
        asked = {"request_type": "context_only", "disagg_request_id": number}
        return body.replace(stream=False, stream_options=None, disaggregated_params=asked)

    @override
    def handover(self, answer: bytes, asked: JsonBody) -> Handover | None:
        try:
            told = _decode_answer(answer)
        except UNREADABLE as error:
            raise EngineGarbled(f"its answer to a prefill cannot be read: {error}") from error
        cached = read_answer_usage(answer).cached_tokens
        choice = told.choices[0] if told.choices else _Choice()
        if choice.finish_reason not in _GOES_ON:
            return Handover({}, cached)
        kept = choice.disaggregated_params or {}
        if kept.get("ctx_request_id", NULL) == NULL:
            return None
        # Whatever number the answer names, it is no other request's KV.
        number = asked.view(_PARAMS)["disagg_request_id"]
        params = {**kept, "request_type": _GENERATION, "disagg_request_id": number}
        if "ctx_usage" in kept:  # a version that takes no such field does not name it
            params["ctx_usage"] = told.usage
        fields = {_PARAMS: msgspec.Raw(msgspec.json.encode(params)), _IDS: told.prompt_token_ids}
        return Handover({name: each for name, each in fields.items() if each != NULL}, cached)

    @override
    def second_leg(self, body: JsonBody, handover: Handover) -> JsonBody:
        """The prompt goes as the token ids that the first engine computed."""
        fields = dict(handover.fields)
        ids = fields.pop(_IDS, None)
        if ids is not None:
            fields[_IDS if "messages" in body else "prompt"] = ids
        return body.replace(**fields)


_GENERATION = msgspec.Raw(b'"generation_only"')


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    disaggregated_params: Mapping[str, msgspec.Raw] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []
    prompt_token_ids: msgspec.Raw = NULL
    usage: msgspec.Raw = NULL


_decode_answer = msgspec.json.Decoder(_Answer).decode
