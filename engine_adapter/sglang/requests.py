"""A request as SGLang gets it: routes beside `/v1`, namespace, LoRA adapter and tokens, and where the two
halves of a request meet."""

from __future__ import annotations

import hashlib
import re
import secrets
from array import array
from collections.abc import Mapping
from functools import lru_cache
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import msgspec
from typing_extensions import override

from engine_adapter.body import JsonBody, RawFields, decode_object
from engine_adapter.errors import EngineRejected
from engine_adapter.hold import AnswerReader, Hold, Rendezvous
from engine_adapter.http.answer_fields import NULL
from engine_adapter.http.control import ControlClient
from engine_adapter.http.openai_answer import USAGE, OpenAIAnswer, hold_openai, pass_marked
from engine_adapter.options import ASK, READ, NativeRoute, PromptFields
from engine_adapter.prompt.template_input import ContentFormat, TemplateInput
from engine_adapter.prompt.template_trials import looped
from engine_adapter.sglang.server_info import EVENTS_CARRY_SALTS, ServerInfo
from engine_adapter.types import EngineSpec, KvTarget, Role, TokenIds

# --- the routes of SGLang beside `/v1` ------------------------------------------------------------------
# Not declared: what changes the server or shows its operator's side, such as `/flush_cache`, `/server_info`,
# `/load_lora_adapter`, `/update_weights_from_disk`, `/abort_request`, `/open_session`; and `/invocations`,
# `/vertex_generate` and `/api/*`, whose prompts kvpin does not follow.

GENERATE = "/generate"
# With these fields of /generate, token ids do not identify the prompt, or its KV.
_MORE_THAN_TEXT = frozenset(
    {
        "input_embeds", "image_data", "video_data", "audio_data", "session_params", "lora_path", "extra_key",
        "positional_embed_overrides",
    }
)  # fmt: skip
ROUTES = {
    GENERATE: NativeRoute(
        prompt=PromptFields(text="text", ids="input_ids", unless=_MORE_THAN_TEXT), runs=True
    ),
    **dict.fromkeys(("/encode", "/classify", "/tokenize", "/detokenize"), ASK),
    **dict.fromkeys(("/get_model_info", "/model_info", "/ping"), READ),
}
RUNS_NONE = frozenset(
    {"/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize", "/v1/messages/count_tokens"}
)
"""Routes that run no model. On all others, a salt keeps tenants apart, or they are refused."""


# --- chats as SGLang gives them to the model's template: read into its models, and written out again ----
# So a tool has all fields of these models, and a call an index. These are the models of 0.5.23.

# Templates with one of these words get parts, as do those that loop over one of these contents.
_OF_MEDIA = ("image", "audio", "video", "vision")
_CONTENTS = frozenset({"message.content", "msg.content", "m.content"})
# The fields of its models that a template gets, in their order. A function keeps the client's order.
_OF_FUNCTIONS = ("description", "name", "parameters")
_OF_USERS = ("role", "content")
_OF_MESSAGES = ("role", "content", "tool_call_id", "name", "phase", "reasoning_content", "tool_calls")
_JOINT = " "


def _tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "type": tool.get("type", "function"),
            "function": _function(tool.get("function")),
            "defer_loading": tool.get("defer_loading"),
        }
        for tool in tools
    ]


def _function(function: Any) -> Any:  # noqa: ANN401 - JSON
    """A tool without a function stays: the server refuses it."""
    if not isinstance(function, dict):
        return function
    optional = ("strict", "defer_loading")
    known = {
        name: value
        for name, value in function.items()
        if name in _OF_FUNCTIONS or (name in optional and value is not None)
    }
    return known | {name: None for name in _OF_FUNCTIONS if name not in known}


def _message(message: dict[str, Any], _wanted: ContentFormat) -> dict[str, Any]:
    names = _OF_USERS if message["role"] == "user" else _OF_MESSAGES
    given: dict[str, Any] = {
        name: message.get(name) for name in names if name == "content" or message.get(name) is not None
    }
    content = given["content"]
    if message["role"] == "tool" and isinstance(content, list):
        content = _JOINT.join(part["text"] for part in content)
    given["content"] = "" if content is None else content
    if "tool_calls" in given:
        given["tool_calls"] = list(map(_call, given["tool_calls"]))
    return given


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = {name: call["function"].get(name) for name in ("name", "arguments")}
    return {"id": call.get("id"), "index": call.get("index"), "type": "function", "function": function}


@lru_cache(maxsize=64)
def _content_format(template: str) -> ContentFormat:
    has_media = any(word in template for word in _OF_MEDIA)
    return ContentFormat.PARTS if has_media or _CONTENTS & looped(template) else ContentFormat.STRING


SGLANG_INPUT = TemplateInput(_tools, _message, _JOINT, _content_format)


# --- cached tokens in answers ----------------------------------------------------------------------------
# They are in `meta_info` of `/generate`, and in the `sglext` field of the OpenAI routes, for servers whose
# usage does not report them. SGLang sends `sglext` on request, and only if the prompt reused something. In a
# stream it is a chunk of its own before the usage. If the client did not ask for it, it is removed. Its count
# is copied into the usage.

_IN_EXTENSION = "cached_tokens_details"
# Stands beside the details where there are several choices, empty if the client did not ask for it.
_SPECULATION, _NOTHING = "spec_tokens_details", msgspec.Raw(b"[]")
_USAGE_OR_EXTENSION = {**USAGE, b'"sglext"': re.compile(rb'"sglext"\s*:\s*\{')}
# The answer is complete.
_FINISHED = b'"finish_reason":"'
# In `meta_info`. Text cannot contain it: quotes in JSON strings have a backslash.
_CACHED = re.compile(rb'"cached_tokens"\s*:\s*(\d+)\b(?=\s*[,}])')
_LONGEST_MARK = 64
_NO_CHOICES = msgspec.Raw(b"[]")


class _Tiers(msgspec.Struct):
    """Cached tokens by tier."""

    device: int = 0
    host: int = 0
    storage: int | None = None


class DetailsAnswer(OpenAIAnswer):
    """Reads an answer to a request with `cached_tokens_details`."""

    def __init__(self, *, streams: bool, hides_details: bool) -> None:
        """`hides_details`: the client did not ask for them."""
        super().__init__(streams=streams)
        self.marks = (b'"usage"', b'"sglext"', _FINISHED)
        self._hides_details = hides_details
        self._finished = False

    @override
    def cached_tokens(self) -> int | None:
        # None if the answer broke off.
        return self._cached or 0 if self._finished else None

    @override
    def _pass_events(self, events: bytes) -> bytes:
        self._finished |= _FINISHED in events
        return pass_marked(events, _USAGE_OR_EXTENSION, self._pass)

    @override
    def _read(self, fields: RawFields) -> bool | None:
        is_last = not self._streams or fields.get("choices") == _NO_CHOICES
        changed = self._read_details(fields)
        if is_last and fields.get("usage", NULL) != NULL:
            return self._fill_usage(fields) or changed
        held_nothing_else = self._streams and is_last and changed and "sglext" not in fields
        return None if held_nothing_else else changed

    def _read_details(self, fields: RawFields) -> bool:
        """Reads the details; True if they were removed."""
        extension = decode_object(fields["sglext"]) if fields.get("sglext", NULL) != NULL else {}
        if _IN_EXTENSION not in extension:
            return False
        tiers = msgspec.json.decode(extension.pop(_IN_EXTENSION), type=_Tiers)
        self._cached = tiers.device + tiers.host + (tiers.storage or 0)
        if not self._hides_details:
            return False
        if extension.get(_SPECULATION) == _NOTHING:
            del extension[_SPECULATION]
        if extension:
            fields["sglext"] = msgspec.Raw(msgspec.json.encode(extension))
        else:
            del fields["sglext"]
        return True

    def _fill_usage(self, fields: RawFields) -> bool:
        """Adds the cached tokens to a usage without them; True if it did."""
        self._finished = True
        usage = decode_object(fields["usage"])
        details = usage.get("prompt_tokens_details", NULL)
        known = decode_object(details) if details != NULL else {}
        if known.get("cached_tokens", NULL) != NULL:
            return False
        known["cached_tokens"] = msgspec.Raw(b"%d" % (self._cached or 0))
        usage["prompt_tokens_details"] = msgspec.Raw(msgspec.json.encode(known))
        fields["usage"] = msgspec.Raw(msgspec.json.encode(usage))
        return True


class GenerateAnswer(AnswerReader):
    """Reads answers of `/generate`: every answer and event tells the cached tokens. Changes nothing."""

    takes_pieces = True

    def __init__(self) -> None:
        self._cached: int | None = None
        self._held = b""  # may end inside what is searched for

    @override
    def feed(self, chunk: bytes) -> bytes:
        if self._cached is None:
            searched = self._held + chunk
            found = _CACHED.search(searched)
            self._cached = int(found[1]) if found is not None else None
            self._held = searched[-_LONGEST_MARK:]
        return chunk

    @override
    def cached_tokens(self) -> int | None:
        # Of several prompts, those of the first.
        return self._cached


# --- requests -------------------------------------------------------------------------------------------
# extra_key    → merged into cache_salt, because events carry cache_salt but not extra_key
# LoRA name    → lora_path, because SGLang serves its base model for a LoRA name in `model`
# exact tokens → input_ids of a chat, prompt of a completion, so that SGLang need not tokenise again

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_RESPONSES, _MESSAGES = "/v1/responses", "/v1/messages"
_SALTED = (CHAT, COMPLETIONS, _RESPONSES, GENERATE)
# Fields of /generate by which other servers of a deployment, not its clients, steer the server.
_NOT_OF_CLIENTS = ("kv_hints", "http_worker_ipc")
_DETAILS = "return_cached_tokens_details"
_DETAILS_SINCE = (0, 5, 10)


def hold_request(
    info: ServerInfo, path: str, body: JsonBody, prompt: KvTarget | None, *, jinja: bool
) -> Hold:
    """The hold of a request.

    With `jinja`, the server renders chats with a Jinja template, which makes nothing but the prompt. Raises
    EngineRejected if the server would use another tenant's KV, or ignore the LoRA adapter."""
    changes = _of_the_tenant(info, path, body)
    if prompt is not None and prompt.exact and prompt.token_ids is not None:
        changes |= _tokens(info, path, body, prompt.token_ids.tolist(), jinja=jinja)
    hold = _asked(info, path, body, changes)
    if prompt is not None:
        foreseen = _foreseen(info, path, body, prompt)
        if foreseen is not None:
            hold.cached_tokens, hold.firm = foreseen, False
    return hold


def kept_apart(info: ServerInfo, path: str, body: JsonBody, dp_rank: int | None = None) -> JsonBody:
    """Sets namespace, LoRA adapter and, where no header does, the data-parallel rank, also of requests that
    are not followed. Leaves what `hold_request` set. Raises EngineRejected like that."""
    changes = _of_the_tenant(info, path, body)
    if path == GENERATE and dp_rank is not None:
        changes["routed_dp_rank"] = dp_rank
    return body.replace(**changes) if changes else body


def tells_cached_tokens(info: ServerInfo) -> bool:
    """True if answers to chats and completions can report cached tokens."""
    return info.cache_report or info.release >= _DETAILS_SINCE


def _of_the_tenant(info: ServerInfo, path: str, body: JsonBody) -> dict[str, object]:
    """The changes that keep a request within its tenant's namespace and LoRA adapter."""
    changes = _salted(info, path, body) | _with_lora(info, path, body)
    if path == GENERATE:
        changes |= {name: None for name in _NOT_OF_CLIENTS if name in body}
    return changes


def _salted(info: ServerInfo, path: str, body: JsonBody) -> dict[str, object]:
    """The changes that put a request's namespace, which begins with its salt, where events carry it."""
    salt = body.get("cache_salt")
    takes_salt = path in _SALTED and (path != GENERATE or info.release >= EVENTS_CARRY_SALTS)
    if salt is not None and not (path in RUNS_NONE or takes_salt):
        raise EngineRejected(
            f"SGLang takes no cache_salt on {path}, so that tenants' KV would not be kept apart: use {CHAT}",
            status=403,
            param="cache_salt",
            headers={"x-should-retry": "false"},
        )
    key = body.get("extra_key") if path in _SALTED else None
    if isinstance(key, str) and key:
        return {"cache_salt": _folded(salt, key), "extra_key": None}
    if isinstance(key, list) and all(isinstance(item, str) for item in key):
        # One for each prompt of a batch.
        return {"cache_salt": [_folded(salt, item) for item in key] or salt, "extra_key": None}
    return {}


def _folded(salt: str | None, key: str) -> str:
    """One salt for both. It starts with the salt, which identifies the tenant's KV."""
    digest = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
    return f"{salt or ''}-extra-{digest}" if key else salt or ""


def _with_lora(info: ServerInfo, path: str, body: JsonBody) -> dict[str, object]:
    """The changes that select the LoRA adapter named in `model`; none for the base model."""
    name = body.get("model")
    if not isinstance(name, str) or name not in info.served.loras or body.get("lora_path") == name:
        return {}
    if path in (CHAT, COMPLETIONS, GENERATE) and ":" not in name:
        return {"lora_path": name}
    if path in (CHAT, COMPLETIONS, _MESSAGES):
        return {"model": f"{info.served.name}:{name}"}
    raise EngineRejected(f"SGLang serves no LoRA adapters on {path}: use {CHAT}", status=400, param="model")


def _tokens(
    info: ServerInfo, path: str, body: JsonBody, token_ids: list[int], *, jinja: bool
) -> dict[str, object]:
    """The changes that replace text by its tokens."""
    if path == CHAT:
        # SGLang's chats ignore add_generation_prompt, so it would render a different prompt.
        return {"input_ids": token_ids} if jinja and "add_generation_prompt" not in body else {}
    # SGLang echoes tokens differently from text.
    # It ignores add_special_tokens, which kvpin reads.
    is_text = isinstance(body.get("prompt"), str) and "add_special_tokens" not in body
    if path == COMPLETIONS and is_text and not body.get("echo"):
        return {} if info.completion_template is not None else {"prompt": token_ids}
    return {}


def _asked(info: ServerInfo, path: str, body: JsonBody, changes: dict[str, object]) -> Hold:
    """The hold of a request, changed so that its answer reports cached tokens."""
    if path == GENERATE:
        return Hold(body.replace(**changes) if changes else body, answer=GenerateAnswer())
    details = info.radix_cache and not info.cache_report and tells_cached_tokens(info)
    if not details or path not in (CHAT, COMPLETIONS):
        return hold_openai(path, body, changes=changes, ask_usage=info.cache_report)
    hold = hold_openai(path, body, changes={**changes, _DETAILS: True})
    hold.answer = DetailsAnswer(
        streams=body.get("stream") is True, hides_details=body.get(_DETAILS) is not True
    )
    return hold


def _foreseen(info: ServerInfo, path: str, body: JsonBody, prompt: KvTarget) -> int | None:
    """The cached tokens it will report, where the index cannot know; else None."""
    if path == COMPLETIONS:  # it may reuse nothing, or have another prompt than kvpin thinks
        is_templated = info.completion_template is not None and not isinstance(body.get("prompt"), list)
        if (body.get("echo") and body.get("logprobs")) or is_templated:
            return 0
    samples = body.get("n")
    if isinstance(samples, int) and samples > 1 and info.page_size and prompt.token_ids is not None:
        # SGLang computes the prompt once first, so every answer finds it in the cache.
        return max(len(prompt.token_ids) - 1, 0) // info.page_size * info.page_size
    return None


# The fields of a chat that make its prompt. /tokenize refuses some of the others, such as `stream`, and reads
# some that chats do not have, such as add_generation_prompt.
_OF_PROMPTS = (
    "messages", "tools", "tool_choice", "chat_template_kwargs", "reasoning", "reasoning_effort", "thinking",
    "task", "response_format", "continue_final_message", "input_ids",
)  # fmt: skip
_CHAT = {"messages": [{"role": "user", "content": "."}]}
# First version whose /tokenize reads add_generation_prompt; it refuses it without a Jinja template.
_REFUSES_SINCE = (0, 5, 23)


class _Tokens(msgspec.Struct, frozen=True):
    tokens: list[int]


async def tokenize(control: ControlClient, path: str, body: JsonBody) -> TokenIds[int]:
    """Token ids of a chat, a completion or a request of `/generate`."""
    if path == CHAT:
        fields = {name: msgspec.Raw(body.raw_of(name)) for name in _OF_PROMPTS if name in body}
        return await _ask(control, msgspec.json.encode(fields))
    if path not in (COMPLETIONS, GENERATE):
        raise EngineRejected(f"SGLang cannot tokenise {path}", status=404)
    prompt = body.get("text" if path == GENERATE else "prompt")
    if isinstance(prompt, list):
        if len(prompt) != 1 or not isinstance(prompt[0], str):
            raise EngineRejected("it is not one text", status=400, param="prompt")
        prompt = prompt[0]
    return await _ask(control, msgspec.json.encode({"prompt": prompt}))


async def tokenizes_chats(control: ControlClient) -> bool:
    """True if it can tokenise chats. Old servers cannot, nor servers without a tokenizer."""
    return await _takes(control, _CHAT)


async def uses_jinja(control: ControlClient, info: ServerInfo) -> bool:
    """True if chats are known to be rendered by a Jinja template. SGLang's own templates also add stop words,
    which it takes from the messages and not from tokens."""
    return info.release >= _REFUSES_SINCE and await _takes(control, {**_CHAT, "add_generation_prompt": True})


async def _takes(control: ControlClient, body: object) -> bool:
    return await control.status("POST", "/tokenize", json=body) == HTTPStatus.OK


async def _ask(control: ControlClient, raw: bytes) -> TokenIds[int]:
    return array("i", (await control.read(_Tokens, "POST", "/tokenize", content=raw)).tokens)


# --- how the two halves of an SGLang (`--disaggregation-mode`) meet for a request -----------------------
# Both get the request with the address of the prefill server's bootstrap server, and with a room there, which
# no other request has. The decode server reads the KV, and with it the first token, from the room. A decode
# server whose room no prefill server enters waits until its client leaves, and answers nothing.

ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE}
# Rooms are positive int64. Of several data-parallel ranks, a room's remainder is the one that serves it.
_ROOMS = 2**62


def rendezvous_of(info: ServerInfo, spec: EngineSpec) -> Rendezvous | None:
    """How a server meets its other half: in a room of the prefill server's bootstrap server, which has the
    host at which kvpin reaches that server. None if it is whole."""
    if not info.is_half:
        return None
    rank, ranks = (0, 1) if spec.options.rank is None else (spec.options.rank, info.dp_ranks)
    place = {"bootstrap_host": urlsplit(spec.url).hostname or "", "bootstrap_port": info.bootstrap_port}

    def meet() -> Mapping[str, object]:
        return {**place, "bootstrap_room": (1 + secrets.randbelow(_ROOMS // ranks)) * ranks + rank}

    return Rendezvous(
        f"SGLang's bootstrap rooms, {info.transfer_backend}",
        "add an SGLang server of the model with the other --disaggregation-mode and the same "
        "--disaggregation-transfer-backend",
        frozenset({CHAT, COMPLETIONS, GENERATE}),
        meet,
    )


def check_is_one(info: ServerInfo, path: str, body: JsonBody) -> None:
    """Raises EngineRejected for a request with several answers in one room: the decode server would never
    answer it. kvpin splits those of `/v1`."""
    if not info.is_half or path != GENERATE:
        return
    sampling = body.get("sampling_params")
    several = [name for name in ("text", "input_ids") if body.items(name) is not None]
    if isinstance(sampling, list) or (isinstance(sampling, dict) and sampling.get("n") not in (None, 1)):
        several.append("sampling_params")
    if several:
        raise EngineRejected(
            f"{several[0]} asks for several answers, and a pair of SGLang servers gives one at a time on "
            f"{GENERATE}: send a request for each, or use {COMPLETIONS}",
            status=400,
            param=several[0],
        )
