"""Decides which request fields go to the server, and how its chat template gets tools.

trtllm-serve refuses a request with an unknown field. So kvpin removes unknown fields that cannot change the
answer. Fields that can change it stay, and the server refuses them. A cache salt is never removed from a
request that runs a prompt, because the request could then reuse another tenant's KV.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine_adapter.body import JsonBody
from engine_adapter.errors import EngineRejected
from engine_adapter.types import KvTarget

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = "/v1/messages"
PROMPT_ROUTES = frozenset({CHAT, COMPLETIONS, RESPONSES, MESSAGES})
SALT = "cache_salt"
# Fields of other engines, gateways and OpenAI that cannot change an answer: routing, priority, user,
# metadata.
HINTS = frozenset(
    {
        "cache_namespace",
        "conversation_params",
        "metadata",
        "nvext",
        "prediction",
        "priority",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "rid",
        "safety_identifier",
        "service_tier",
        "session_id",
        "store",
        "user",
    }
)
# The hints and the fields of kvpin's own that versions 1.2 to 1.4 take, for servers that do not list their
# fields.
KNOWN: Mapping[str, frozenset[str]] = {
    CHAT: frozenset({"conversation_params", "priority", "user", SALT, "prompt_token_ids"}),
    COMPLETIONS: frozenset({"conversation_params", "priority", "user"}),
}
# With these, the server does more with a text than tokenise it.
_MORE_THAN_TOKENS = ("prompt_token_ids", "echo", "truncate_prompt_tokens", "documents", "mm_processor_kwargs")


class RequestFields:
    """The request fields that each route of a server takes.

    Attributes:
        numbers_phases: the two phases of a divided request can have a number, by which KV is asked for.
    """

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


class GivenTools:
    """The client's tools → those of the chat template: read into trtllm-serve's models and written out again.

    So every field of these models is there, in their order, with null where the client gave none: a template
    that writes tools first would share almost nothing with one that got the client's JSON.
    """

    def __init__(self, openapi: object = None) -> None:
        """`openapi` is the server's description of its routes, if it gives one."""
        listed = look_up(openapi, "components", "schemas", "FunctionDefinition", "properties")
        self.fields: Sequence[str] = tuple(listed) if isinstance(listed, dict) and listed else FUNCTION

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GivenTools) and self.fields == other.fields

    def __hash__(self) -> int:
        return hash(self.fields)

    def __call__(self, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """A tool without a function stays: the server refuses it."""
        return [self._written(tool, tool.get("function")) for tool in tools]

    def _written(self, tool: dict[str, Any], function: object) -> dict[str, Any]:
        if not isinstance(function, dict):
            return tool
        written = {name: function.get(name) for name in self.fields}
        return {"type": tool.get("type", "function"), "function": written}
