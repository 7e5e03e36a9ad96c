"""All that differs between engines, behind one facade.

`proxy` reaches the adapters only through it. What both sides compute alike, `proxy` imports from its module:
`prompt/`, `types.py`, `off_loop.py`.

base.py        the contract of every adapter     types.py       the data both sides share
errors.py      its errors
causes.py      cause → retry, blame; error code → HTTP status
detect.py      address → kind; versions of engines
body.py        a request's body, JSON or not
hold.py        forecasts, holds on an engine, KV from the engine that computed it to the one that answers
registry.py    kind → adapter and options; how kvpin starts one, and the `kvpin engine` command
options.py     settings of one kind, routes beside `/v1`, WebSockets, fields that clients of several tenants
               may not send

openai_compatible.py, vllm/, sglang/, tensorrt_llm/, lmdeploy.py, nim.py, llama_server/, torch_engine/
               the adapters
lmcache/       host and disk tier of vLLM        events/        KV events of engines
http/          HTTP towards engines              prompt/        text → token ids, as engines do it
off_loop.py    threads for long computations, what JSON costs
memory.py      what memory there is
end_with_parent.py  ends what kvpin started, if kvpin dies
"""

from __future__ import annotations

from engine_adapter.base import EngineAdapter
from engine_adapter.body import UNREADABLE, JsonBody, NamedModel, RawFields, Upload, decode_object
from engine_adapter.detect import detect_kind
from engine_adapter.end_with_parent import ends_with_parent
from engine_adapter.errors import (
    ChatError,
    EngineChanged,
    EngineDied,
    EngineDiverged,
    EngineError,
    EngineGarbled,
    EngineLate,
    EngineLost,
    EngineRejected,
    EngineSpecError,
    EngineTaken,
    EngineUnavailable,
    EngineUnhealthy,
    EngineUnreachable,
    ModelFailed,
    ModelNotLoaded,
    NotSupported,
    PromptTableError,
    log_text,
)
from engine_adapter.events.options import address_of_rank
from engine_adapter.hold import (
    AnswerReader,
    Forecast,
    Handover,
    Hold,
    Rendezvous,
    RequestBody,
    Resumption,
    Transfer,
)
from engine_adapter.http.answer_fields import (
    UNREAD,
    read_answer_usage,
    read_error,
    read_streamed_error,
    read_streamed_usage,
)
from engine_adapter.http.client import HttpTransport
from engine_adapter.http.connection import IncomingResponse
from engine_adapter.http.openai_answer import Opening, Says, tell_cached, what_is_said
from engine_adapter.http.prepare import HeaderPairs, Headers, OutgoingRequest, base_url, route_of
from engine_adapter.http.sse import Speech, WholeEvents
from engine_adapter.options import (
    ADAPTER_FIELDS,
    HINTS,
    OWN_IDS,
    PRIVATE_FIELDS,
    PRIVATE_HEADERS,
    PRIVATE_WITHIN,
    EngineOptions,
    OptionError,
    plain_error,
    websocket,
)
from engine_adapter.registry import (
    ENGINE_KINDS,
    ENGINE_OPTIONS,
    NATIVE_ROUTES,
    check_kind,
    check_role,
    keeps_apart,
    make_adapter,
    make_options,
    managed_kind,
    run_engine_cli,
)
from engine_adapter.types import (
    BelowGpu,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    Capability,
    EngineInfo,
    EngineLoad,
    EngineSpec,
    EventPosition,
    Finding,
    KvProgress,
    KvTarget,
    KvVerb,
    ModelState,
    Pinned,
    PromptTable,
    Retention,
    Role,
    Tier,
    ViewCurrent,
    ViewLost,
    ViewResumed,
    common_prefix,
)
