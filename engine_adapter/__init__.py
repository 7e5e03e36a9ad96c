"""Engines, behind one facade. `proxy` imports from here and nothing below.

base.py        the contract        types.py   its words        errors.py  its errors
hold.py        what a request takes of an engine while it runs
error_bodies.py  the errors engines answer, in one shape
openai_answer.py  what kvpin asks of an answer beyond its client    usage.py  cached tokens in answers
managed.py     kind → command line of an engine that kvpin starts
detect.py      address → kind
registry.py    kind → adapter      http.py    the transport seam of the data plane
extra_ids.py   identity of embeddings          chat.py    render + tokenise as transformers does
body.py        a request's JSON body           encoders.py  the fastest exact encoder
torch_engine/  the embedded engine and its adapter
"""

from __future__ import annotations

from engine_adapter.base import EngineAdapter
from engine_adapter.body import JsonBody
from engine_adapter.detect import detect_kind
from engine_adapter.engine_command import ENGINE_MODULE, run_engine_cli
from engine_adapter.errors import (
    ChatError,
    EngineError,
    EngineRejected,
    EngineSpecError,
    EngineUnavailable,
    NotSupported,
    PromptTableError,
)
from engine_adapter.hold import AnswerReader, Forecast, Hold, RequestBody, SelfPlaced
from engine_adapter.http.control import route_of
from engine_adapter.http.error_bodies import read_error
from engine_adapter.http.transport import AiohttpTransport, IncomingResponse, OutgoingRequest, Transport
from engine_adapter.http.usage import read_answer_usage, read_streamed_usage
from engine_adapter.managed import (
    check_command,
    health_path,
    managed_advice,
    managed_command,
    managed_spec,
    prepare_managed,
)
from engine_adapter.options import EngineOptions, OptionError
from engine_adapter.prompt.prefixes import common_prefix
from engine_adapter.registry import ENGINE_KINDS, ENGINE_OPTIONS, check_kind, make_adapter, make_options
from engine_adapter.types import (
    BelowGpu,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    Capability,
    EngineInfo,
    EngineLoad,
    EngineSpec,
    Finding,
    KvEvent,
    KvProgress,
    KvTarget,
    KvVerb,
    Pinned,
    PromptTable,
    RenderedPrompt,
    Tier,
    ViewCurrent,
    ViewLost,
)

__all__ = [
    "ENGINE_KINDS",
    "ENGINE_MODULE",
    "ENGINE_OPTIONS",
    "AiohttpTransport",
    "AnswerReader",
    "BelowGpu",
    "BlocksRemoved",
    "BlocksStored",
    "CacheCleared",
    "Capability",
    "ChatError",
    "EngineAdapter",
    "EngineError",
    "EngineInfo",
    "EngineLoad",
    "EngineOptions",
    "EngineRejected",
    "EngineSpec",
    "EngineSpecError",
    "EngineUnavailable",
    "Finding",
    "Forecast",
    "Hold",
    "IncomingResponse",
    "JsonBody",
    "KvEvent",
    "KvProgress",
    "KvTarget",
    "KvVerb",
    "NotSupported",
    "OptionError",
    "OutgoingRequest",
    "Pinned",
    "PromptTable",
    "PromptTableError",
    "RenderedPrompt",
    "RequestBody",
    "SelfPlaced",
    "Tier",
    "Transport",
    "ViewCurrent",
    "ViewLost",
    "check_command",
    "check_kind",
    "common_prefix",
    "detect_kind",
    "health_path",
    "make_adapter",
    "make_options",
    "managed_advice",
    "managed_command",
    "managed_spec",
    "prepare_managed",
    "read_answer_usage",
    "read_error",
    "read_streamed_usage",
    "route_of",
    "run_engine_cli",
]
