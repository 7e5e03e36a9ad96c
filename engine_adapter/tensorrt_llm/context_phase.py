"""KV from one trtllm-serve to another: the context phase on one, the generation phase on the other.

The first leg is the request with `request_type` `context_only`: its engine computes the prompt and one token,
whatever the request's limit, and keeps the KV. Its choice has `disaggregated_params`. The second leg is the
request with these and `generation_only`; its engine fetches the KV by the request's number, and goes on after
that token. So both phases of one request have the same number, and no other request has it: kvpin draws it.

KV that is gone is never another prompt's: it is asked for by its number. The second engine then fails, or
waits for `kv_transfer_timeout_ms`. An answer with several choices would fetch the KV several times, and one
that is no stream would not show that its engine waits in vain. So these fetch with a request of their own.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import msgspec
from typing_extensions import override

from engine_adapter.body import UNREADABLE, JsonBody
from engine_adapter.errors import EngineGarbled
from engine_adapter.http.usage import read_answer_usage
from engine_adapter.tensorrt_llm.fields import CHAT, COMPLETIONS
from engine_adapter.transfer import Handover, Transfer
from engine_adapter.types import TokenIds

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

    `usable_s` is below `kv_transfer_timeout_ms` of their cache transceivers, 60 s by default.
    """

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
        if _is_null(kept.get("ctx_request_id", _NULL)):
            return None
        # Whatever number the answer names, it is no other request's KV.
        number = asked.view(_PARAMS)["disagg_request_id"]
        params = {**kept, "request_type": _GENERATION, "disagg_request_id": number}
        if "ctx_usage" in kept:  # a version that takes no such field does not name it
            params["ctx_usage"] = told.usage
        fields = {_PARAMS: msgspec.Raw(msgspec.json.encode(params)), _IDS: told.prompt_token_ids}
        return Handover({name: each for name, each in fields.items() if not _is_null(each)}, cached)

    @override
    def second_leg(self, body: JsonBody, handover: Handover) -> JsonBody:
        """The prompt goes as the token ids that the first engine computed."""
        fields = dict(handover.fields)
        ids = fields.pop(_IDS, None)
        if ids is not None:
            fields[_IDS if "messages" in body else "prompt"] = ids
        return body.replace(**fields)


_NULL, _GENERATION = msgspec.Raw(b"null"), msgspec.Raw(b'"generation_only"')


def _is_null(value: msgspec.Raw) -> bool:
    return bytes(value) == b"null"


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    disaggregated_params: Mapping[str, msgspec.Raw] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []
    prompt_token_ids: msgspec.Raw = _NULL
    usage: msgspec.Raw = _NULL


_decode_answer = msgspec.json.Decoder(_Answer).decode
