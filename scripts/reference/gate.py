"""The page of the limits that a request meets on its way in, in their order.

Each step needs only what the steps before it let in: nothing is read, decoded or counted before that.
"""

from __future__ import annotations

from typing import NamedTuple

from pydantic.fields import FieldInfo

from engine_adapter.causes import Code
from engine_adapter.prompt.encoders import MAX_CHARS_PER_TOKEN
from engine_adapter.prompt.sandbox import MAX_S
from proxy.http.exchange import BODY_BYTES_PER_S, BODY_S
from proxy.http.http1 import MAX_HEAD
from proxy.http.listeners import MAX_CONNECTIONS
from proxy.request.bodies import (
    MAX_ENTRIES,
    MAX_FIELDS,
    MAX_OWN_BYTES,
    MAX_OWN_LEVELS,
    OWN_FIELDS,
)
from proxy.settings import Settings
from proxy.settings.schema import ApiKeySettings, LimitSettings
from scripts.reference.markdown import page, table
from scripts.reference.settings import default_of

STEPS = (
    "connection",
    "head",
    "key",
    "quota",
    "size",
    "shape",
    "model",
    "length",
    "structure",
    "queue",
)
"""The steps of the gate, in their order."""


class Limit(NamedTuple):
    """A limit of one step.

    Attributes:
        step: one of `STEPS`.
        setting: a setting, e.g. `limits.body_bytes`; "" for a constant.
        most: the constant, in words; "" for a setting.
        code: of the error; a status where the answer has no code.
        reason: of `kvpin_refused_total`; "" for a refusal that is only in `kvpin_requests_total`.
    """

    step: str
    what: str
    setting: str
    most: str
    code: Code | int
    reason: str = ""


LIMITS = (
    Limit(
        "connection",
        "connections",
        "",
        f"half of the open files, at most {MAX_CONNECTIONS:,}",
        Code.NO_ENGINE,
    ),
    Limit("head", "bytes of a request line and headers", "", f"{MAX_HEAD:,}", 431),
    Limit("key", "keys that are known", "api_keys", "", Code.INVALID_API_KEY),
    Limit("key", "the time of a key", "api_keys.expires", "", Code.INVALID_API_KEY),
    Limit(
        "quota",
        "requests of a tenant in a minute",
        "api_keys.requests_per_minute",
        "",
        Code.RATE_LIMIT_EXCEEDED,
        "limit",
    ),
    Limit(
        "quota",
        "tokens of a tenant in a minute: prompts, also those that are only counted, and answers",
        "api_keys.tokens_per_minute",
        "",
        Code.RATE_LIMIT_EXCEEDED,
        "limit",
    ),
    Limit(
        "quota",
        "requests of a tenant at a time",
        "api_keys.concurrent_requests",
        "",
        Code.RATE_LIMIT_EXCEEDED,
        "limit",
    ),
    Limit(
        "quota",
        "bytes of all bodies together; half for one of several tenants",
        "limits.bodies_bytes",
        "",
        Code.OVERLOADED,
        "memory",
    ),
    Limit("size", "bytes of a body", "limits.body_bytes", "", Code.BODY_TOO_LARGE, "size"),
    Limit(
        "size",
        "seconds without a byte; each KiB gives one back",
        "",
        f"{BODY_S:g} s, {BODY_BYTES_PER_S:,} bytes/s",
        Code.SLOW_BODY,
        "slow",
    ),
    Limit("shape", "bytes of JSON that are not base64", "limits.json_bytes", "", Code.BODY_TOO_LARGE, "size"),
    Limit("shape", "entries of lists and objects", "limits.json_values", "", Code.TOO_COMPLEX, "shape"),
    Limit(
        "shape", "fields of objects, lists and objects", "limits.json_fields", "", Code.TOO_COMPLEX, "shape"
    ),
    Limit("shape", "fields of the body itself", "", f"{MAX_FIELDS:,}", Code.TOO_COMPLEX, "shape"),
    Limit(
        "shape",
        "entries of `messages`, `input`, `tools`, and of each list in one of these",
        "",
        f"{MAX_ENTRIES:,}",
        Code.ARRAY_ABOVE_MAX_LENGTH,
        "shape",
    ),
    Limit(
        "shape",
        f"bytes, and levels, of {', '.join(f'`{name}`' for name in OWN_FIELDS)}",
        "",
        f"{MAX_OWN_BYTES:,}; {MAX_OWN_LEVELS}",
        Code.TOO_COMPLEX,
        "shape",
    ),
    Limit("model", "models of a key", "api_keys.models", "", Code.MODEL_NOT_FOUND, "model"),
    Limit("model", "models that are served", "", "those of the engines", Code.MODEL_NOT_FOUND),
    Limit("length", "CPU seconds of a chat template", "", f"{MAX_S:g}", Code.INVALID_MESSAGES),
    Limit(
        "length",
        "characters of a prompt, also of one that is only counted, before it is encoded",
        "",
        f"{MAX_CHARS_PER_TOKEN} for each token of the context",
        Code.CONTEXT_LENGTH_EXCEEDED,
    ),
    Limit("length", "tokens of a prompt", "", "the model's context", Code.CONTEXT_LENGTH_EXCEEDED),
    Limit("structure", "grammars, tools and stop texts", "", "the engine's", Code.ENGINE_REJECTED),
    Limit("queue", "requests of a model that wait", "limits.queue_requests", "", Code.OVERLOADED, "busy"),
    Limit("queue", "bytes of their bodies", "limits.queue_bytes", "", Code.OVERLOADED, "busy"),
    Limit("queue", "seconds that one waits", "limits.queue_s", "", Code.OVERLOADED, "busy"),
)
"""All limits, in the order in which a request meets them."""
_PARTS = {"limits": LimitSettings, "api_keys": ApiKeySettings}


def gate_page() -> str:
    """Every limit: its step, its default, its error, its metric."""
    return page(
        """
        # The gate

        `scripts/docs` writes this page from `scripts/reference/gate.py`: the limits that a request meets
        on its way in, in their order. Each step needs only what the steps before it let in: see the
        [picture](../life.md#the-gate). So a request that is over its tenant's quota is not read, and a body
        with too many values is not decoded.

        *Refused* is the `reason` of `kvpin_refused_total`. Other refusals are in `kvpin_requests_total`, by
        status. Those of connections and heads are in no metric.
        """,
        table(
            ("step", "limit", "setting", "default", "error", "refused"),
            (
                (
                    each.step,
                    each.what,
                    f"`{each.setting}`" if each.setting else "",
                    each.most or default_of(_field(each)),
                    str(each.code) if isinstance(each.code, int) else f"`{each.code}`, {each.code.status}",
                    f"`{each.reason}`" if each.reason else "",
                )
                for each in LIMITS
            ),
        ),
        """
        The bytes of a string count as base64 if it has neither spaces nor escapes nor letters beyond ASCII,
        except for up to 16 KiB at its beginning and at its end.

        A prompt with more than eight characters for each token of the context, and more than 64 Ki in all,
        is first encoded in pieces, until they have more tokens than fit. The tenant pays for the tokens that
        were counted, also if the prompt is refused. `/v1/messages/count_tokens` and
        `/v1/responses/input_tokens` are charged like prompts.

        Long work (to parse, to render, to encode) is done in threads. A tenant has at most half of them, and
        tenants take turns. `kvpin_tenant_cpu_seconds_total` shows what each one's work took.
        """,
    )


def _field(limit: Limit) -> FieldInfo:
    """The setting of a limit."""
    part, _, name = limit.setting.rpartition(".")
    model = _PARTS[part] if part else Settings
    return model.model_fields[name]
