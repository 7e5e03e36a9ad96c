"""Requests that are nearly, hardly or not at all what a client should send: for tests and scripts/fuzz.py."""

import json

from hypothesis import strategies as st

from proxy.request.translate.fates import (
    MESSAGE_BLOCKS,
    MESSAGE_FIELDS,
    MESSAGE_TOOLS,
    RESPONSE_FIELDS,
    RESPONSE_ITEMS,
    RESPONSE_TOOLS,
)

ODD_TEXTS = st.sampled_from(["", "\ud800", "a\udfffb", "\0", "\x7f", "🙂", "x" * 5000])
SHORT = st.text(max_size=10) | ODD_TEXTS
SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | SHORT
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
PART_TYPES = st.sampled_from(["text", "image_url", "prompt_embeds"])
PARTS = st.lists(JSON | st.fixed_dictionaries({"type": PART_TYPES, "text": JSON, "data": JSON}), max_size=3)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer", "x"]) | JSON},
    optional={"content": st.text(max_size=20) | PARTS | JSON, "tool_calls": JSON, "name": JSON},
)
TOKENS = st.lists(st.integers(-5, 700), max_size=40)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "model": st.just("m") | JSON,
        "messages": st.lists(MESSAGE | JSON, max_size=4) | JSON,
        "prompt": st.text(max_size=30) | TOKENS | st.lists(TOKENS, max_size=2) | JSON,
        "stream": st.booleans() | JSON,
        "cache_salt": st.text(max_size=5) | JSON,
        "extra_ids": st.lists(st.integers(-1, 2**65), max_size=40) | JSON,
        "chat_template_kwargs": st.dictionaries(st.text(max_size=8), JSON, max_size=2) | JSON,
        **dict.fromkeys(("prompt_table", "prompt_cache_key", "tools"), JSON),
        **dict.fromkeys(("add_generation_prompt", "add_special_tokens"), JSON),
    },
)


@st.composite
def bodies(draw):
    """Bodies of JSON."""
    return draw(mutated(json.dumps(draw(FIELDS)).encode()))


@st.composite
def mutated(draw, raw):
    """The bytes, one time in four with others in their place somewhere."""
    if draw(st.integers(0, 3)) == 0:
        at = draw(st.integers(0, len(raw)))
        raw = raw[:at] + draw(st.binary(max_size=4)) + raw[at + draw(st.integers(0, 3)) :]
    return raw


PATHS = st.sampled_from(["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/anything"])
MORE_PATHS = PATHS | st.sampled_from(
    [
        *("/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/v1/models", "/v1/models/m"),
        *("/v1/rerank", "/v1/audio/transcriptions", "/v1/files", "/tokenize", "/generate", "/completion"),
        *("/health/live", "/", "/v1/../admin/v1/engines", "/v1/%2e%2e/x", "//v1/models", "/v1/models?a=%ff"),
        *("*", "http://x/v1/models"),
    ]
)
# Mostly right, so that some requests get beyond the parser.
METHODS = st.sampled_from(
    [*["POST"] * 9, "GET", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "CONNECT", "get", "PRI", "A B"]
)
VERSIONS = st.sampled_from(
    [*["HTTP/1.1"] * 24, "HTTP/1.0", "HTTP/2.0", "HTTP/0.9", "HTTP/1.1 x", "", "XTTP/1.1"]
)
LINE_ENDS = st.sampled_from([*["\r\n"] * 40, "\n", "\r", "\r\r\n", " \r\n", "\0\r\n"])
_LENGTHS = ("5", "+5", "-1", "99999999999999999999", "0x5", "5, 5", "5 5", "5\r\ncontent-length: 6")
_CODINGS = ("chunked", "chunked, identity", "xchunked", "gzip, chunked")
HEADERS = st.sampled_from(
    [
        *(f"content-length: {length}" for length in _LENGTHS),
        *(f"transfer-encoding: {coding}" for coding in _CODINGS),
        *("Transfer-Encoding : chunked", "transfer-encoding:\x0bchunked"),
        *("host: localhost", "Host: localhost\r\nHost: y", "host:", ": x", "x", "x : y", " x: y"),
        *("x: a\r\n b", "x: a\0b", "x: \x1b[2J", "x-request-id: " + "r" * 300, "cookie: " + "c" * 9000),
        *("connection: close", "connection: keep-alive, x-a", "connection: upgrade\r\nupgrade: websocket"),
        *("expect: 100-continue", "expect: x", "te: trailers", "trailer: authorization", "via: 1.1 x"),
        *("content-encoding: gzip", "authorization: Bearer x", "authorization: \xff", "x-kvpin-engine: a"),
        *("content-type: application/json", "content-type: multipart/form-data; boundary=x"),
        *("sec-websocket-key: x", "origin: null\r\naccess-control-request-method: POST"),
    ]
)
CHUNKS = st.sampled_from(
    [
        *(b"5\r\nhello\r\n", b"2\r\n{}\r\n", b"0\r\n\r\n", b"0\r\nauthorization: Bearer k\r\n\r\n"),
        *(b"5;x=y\r\nhello\r\n", b"ffffffffffffffff\r\nx", b"-1\r\n", b"0x5\r\nhello\r\n", b"5\nhello\n"),
        *(b"5\r\nhelloX\r\n", b"\r\n", b"zz\r\n"),
    ]
)


@st.composite
def requests(draw):
    """The bytes of a request: head and body, whether they fit together or not."""
    head = f"{draw(METHODS)} {draw(MORE_PATHS)} {draw(VERSIONS)}{draw(LINE_ENDS)}"
    head += draw(st.sampled_from([*["host: localhost\r\n"] * 4, ""]))
    for header in draw(st.just([]) | st.lists(HEADERS, max_size=6)):
        head += header + draw(LINE_ENDS)
    body = draw(bodies() | st.lists(CHUNKS, max_size=4).map(b"".join) | st.binary(max_size=20))
    if draw(st.booleans()):
        head += f"content-length: {len(body)}\r\n"
    return draw(mutated((head + "\r\n").encode("latin-1") + body))


LAST = b"GET /health/live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
STREAMS = st.lists(requests(), min_size=1, max_size=3).map(lambda sent: b"".join([*sent, LAST]))
"""What a client may send on one connection."""

# --- requests of coding agents ---------------------------------------------------------------------------

TEXT = st.sampled_from(["", "Hi", "\ud83d", "é" * 9, '{"a": 1', "x" * 3000]) | st.text(max_size=9)
IDS = st.sampled_from(["call_1", "call_2", "toolu_3", ""])
NAMES = st.sampled_from(["read", "write", "mcp__git__log", "", "a b"])
ARGUMENTS = st.sampled_from(["{}", '{"path": "/x"}', "{", "null", "[1]", '"\\ud83d"', ""])


def kinds(*tables):
    """Types of the current APIs, and versions of them."""
    names = sorted({name for table in tables for name in table})
    return st.sampled_from([*names, *(f"{name}_20250305" for name in names), "text", "input_text"])


def odd(strategy):
    """Nearly always `strategy`, else any JSON."""
    return st.integers(0, 99).flatmap(lambda number: JSON if number == 0 else strategy)


PATH = st.just({"path": "/x"})
TEXT_SOURCE = {"type": "text", "media_type": "text/plain", "data": "x"}
IMAGE_SOURCE = {"type": "base64", "media_type": "image/png", "data": "aGk="}
SOURCE = st.sampled_from([TEXT_SOURCE, IMAGE_SOURCE, {"type": "url", "url": "https://x/y.png"}])
BLOCKS = st.recursive(
    st.fixed_dictionaries(
        {
            "type": kinds(MESSAGE_BLOCKS), "text": odd(TEXT), "id": odd(IDS), "tool_use_id": odd(IDS),
            "name": odd(NAMES), "input": odd(PATH), "thinking": odd(TEXT), "source": odd(SOURCE),
            "content": odd(st.just([])), "title": odd(TEXT),
        },
        optional={
            "data": odd(TEXT), "is_error": odd(st.booleans()),
            "cache_control": odd(st.just({"type": "ephemeral"})), "signature": odd(TEXT),
        },
    ),
    lambda inner: st.fixed_dictionaries(
        {"type": st.just("tool_result"), "content": st.lists(inner, max_size=2), "tool_use_id": odd(IDS)}
    ),
    max_leaves=3,
)  # fmt: skip
ALL_ROLES = ["user", "assistant", "system", "developer", "tool"]
FUNCTIONS = st.fixed_dictionaries({"name": odd(NAMES), "arguments": odd(ARGUMENTS)})
CALL = {"id": odd(IDS), "type": st.just("function"), "function": FUNCTIONS}
CALLS = st.lists(odd(st.fixed_dictionaries(CALL)), max_size=3)


def turns(parts, n_roles):
    """Messages with these parts, of the first roles."""
    roles = st.sampled_from(ALL_ROLES[:n_roles])
    return st.lists(
        odd(
            st.fixed_dictionaries(
                {"role": odd(roles), "content": TEXT | st.lists(odd(parts), min_size=1, max_size=3)},
                optional={
                    "tool_calls": odd(CALLS), "tool_call_id": odd(IDS), "reasoning_content": odd(TEXT),
                },
            )
        ),
        min_size=1,
        max_size=6,
    )  # fmt: skip


TEXTS = st.fixed_dictionaries({"type": st.just("text"), "text": odd(TEXT)})
ITEMS = st.lists(
    odd(
        st.fixed_dictionaries(
            {
                "type": kinds(RESPONSE_ITEMS), "role": odd(st.sampled_from(ALL_ROLES[:4])), "id": odd(IDS),
                "call_id": odd(IDS), "content": TEXT | st.lists(odd(TEXTS), max_size=2),
                "output": odd(TEXT), "name": odd(NAMES),
                "arguments": odd(ARGUMENTS), "summary": odd(st.just([])), "input": odd(TEXT),
            },
            optional={"namespace": odd(NAMES), "encrypted_content": odd(TEXT), "action": JSON},
        )
    ),
    min_size=1,
    max_size=6,
)  # fmt: skip
TYPES = st.sampled_from(["function", "custom", "x"])
SCHEMA = st.just({"type": "object", "properties": {"path": {"type": "string"}}})
TOOLS = st.lists(
    odd(
        st.fixed_dictionaries(
            {
                "type": kinds(MESSAGE_TOOLS, RESPONSE_TOOLS), "name": odd(NAMES), "input_schema": odd(SCHEMA),
                "function": odd(st.fixed_dictionaries({"name": odd(NAMES), "parameters": odd(SCHEMA)})),
                "parameters": odd(SCHEMA), "description": odd(TEXT),
                "tools": st.lists(st.fixed_dictionaries({"type": TYPES, "name": odd(NAMES)}), max_size=2),
            }
        )
    ),
    max_size=3,
)  # fmt: skip


def fields_of(table):
    return st.dictionaries(st.sampled_from(sorted(table)), JSON, max_size=2)


MORE = {"tools": odd(TOOLS), "tool_choice": odd(st.just("auto")), "stream": st.booleans(), "user": odd(TEXT)}
AGENT_FIELDS = {
    "/v1/chat/completions": (
        st.fixed_dictionaries({"messages": turns(TEXTS, 5)}, optional=MORE),
        st.just({}),
    ),
    "/v1/messages": (
        st.fixed_dictionaries(
            {"messages": turns(BLOCKS, 3), "max_tokens": st.just(1)},
            optional=MORE | {"system": odd(TEXT | st.lists(odd(BLOCKS), max_size=2))},
        ),
        fields_of(MESSAGE_FIELDS),
    ),
    "/v1/responses": (
        st.fixed_dictionaries(
            {"input": ITEMS | turns(TEXTS, 5)}, optional=MORE | {"instructions": odd(TEXT)}
        ),
        fields_of(RESPONSE_FIELDS),
    ),
}
AGENT_FIELDS["/v1/messages/count_tokens"] = AGENT_FIELDS["/v1/messages"]


@st.composite
def agent_requests(draw):
    """A path, and a body as a coding agent sends it, but for one thing or another."""
    path = draw(st.sampled_from(sorted(AGENT_FIELDS)))
    usual, rare = AGENT_FIELDS[path]
    fields = {"model": "m", **draw(usual), **(draw(rare) if draw(st.integers(0, 3)) == 0 else {})}
    return path, json.dumps(fields).encode()
