"""Clients without a key, web pages, ever new names, and clients that ask for other tenants' objects."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

from tests.hostile.attacker import ANY, UNKNOWN, Attack, Attacker, each
from tests.hostile.client import CHAT, RESPONSES, chat, head_of, post
from tests.hostile.place import BAD, BROKEN

_EVIL = "evil.example"
_ORIGIN = f"origin: http://{_EVIL}"
_SITE = "sec-fetch-site: cross-site"
_NO_CORS = (_ORIGIN, _SITE, "sec-fetch-mode: no-cors")
_SIMPLE_TYPES = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=b")
_BODY = chat(BROKEN, "hi")
_ENGINE = json.dumps({"kind": "openai_compatible", "url": f"http://{_EVIL}"}).encode()
_FORWARDED = ("x-forwarded-for: 1.2.3.4", "via: 1.1 x", "forwarded: for=1.2.3.4")
_FROM_OUTSIDE = (*_FORWARDED, _ORIGIN, "origin: null", _SITE)


def _pages(_: Attacker) -> Iterator[bytes]:
    """What a browser sends for a page of another origin, or of a name that leads here (DNS rebinding)."""
    for kind in _SIMPLE_TYPES:
        yield post(CHAT, _BODY, f"content-type: {kind}", *_NO_CORS)
    yield post(CHAT, _BODY, "content-type: text/plain", "origin: null")
    for target in ("/v1/models", "/metrics", "/v1/files"):
        yield head_of("GET", target, *_NO_CORS)
        yield head_of("GET", target, _SITE)
        yield head_of("GET", target, host=_EVIL)
    yield post(CHAT, _BODY, host=_EVIL)
    yield post(CHAT, _BODY, _ORIGIN, host=_EVIL)


def _admin(_: Attacker) -> Iterator[bytes]:
    for header in _FROM_OUTSIDE:
        yield post("/admin/v1/engines", _ENGINE, header)
        yield post("/admin/v1/flush", b"{}", header)
    yield post("/admin/v1/engines", _ENGINE, host=_EVIL)


def _wrong_keys(a: Attacker) -> Iterator[bytes]:
    keys = ("", f"{BAD}x", "\xff")
    targets = ("/admin/v1/stats", "/v1/files", "/admin/v1/engines", "/v1/models")
    for key, target in itertools.islice(itertools.cycle(itertools.product(keys, targets)), a.many(300)):
        yield head_of("GET", target, key=key)
    yield head_of("GET", "/admin/v1/engines", key=BAD)


def names(a: Attacker) -> Iterator[bytes]:
    """Each request has names of its own."""
    for number in range(a.many(3_000)):
        name = f"{number}-" + "n" * 150
        fields = dict.fromkeys(("prompt_cache_key", "session_id", "cache_salt", "user"), name)
        yield post(
            CHAT, chat(BROKEN if number % 2 else name, "hi", **fields), f"x-request-id: {number}", key=BAD
        )


def _metrics(_: Attacker) -> Iterator[bytes]:
    yield from (head_of("GET", "/metrics"), head_of("GET", "/metrics", key="x"))


# --- objects that engines keep, asked for by their routes and named in fields

_ROUTES = (
    "files", "files/of-a", "files/of-a/content", "batches", "batches/of-a", "uploads/of-a", "videos",
    "videos/of-a", "vector_stores", "vector_stores/of-a", "vector_stores/of-a/files", "conversations/of-a",
    "conversations/of-a/items", "threads/of-a", "threads/of-a/messages", "assistants", "assistants/of-a",
    "fine_tuning/jobs", "fine_tuning/jobs/of-a", "chat/completions", "chat/completions/of-a",
    "chat/completions/of-a/messages", "responses", "containers", "containers/of-a/files", "evals",
    "evals/of-a", "skills", "chatkit/sessions/of-a",
)  # fmt: skip
_FILE = {"type": "input_file", "file_id": "of-a"}
_NAMED_IN = (
    (RESPONSES, {"input": "x", "conversation": "of-a"}),
    (RESPONSES, {"input": "x", "conversation": {"id": "of-a"}}),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "of-a"}]}),
    (RESPONSES, {"input": [{"role": "user", "content": [_FILE]}]}),
    (RESPONSES, {"input": "x", "previous_response_id": "resp_of_a"}),
    (RESPONSES, {"input": "x", "prompt": {"id": "of-a"}}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": "of-a"}}]}]}),
    ("/v1/batches", {"input_file_id": "of-a", "endpoint": CHAT}),
)


def _by_route(_: Attacker) -> Iterator[bytes]:
    for route, method in itertools.product(_ROUTES, ("GET", "DELETE")):
        yield head_of(method, f"/v1/{route}?model={BROKEN}", key=BAD)


def _by_name(_: Attacker) -> Iterator[bytes]:
    for target, fields in _NAMED_IN:
        yield post(target, json.dumps({"model": BROKEN, **fields}).encode(), key=BAD)


def _between_servers(_: Attacker) -> Iterator[bytes]:
    for name in ("kv_transfer_params", "bootstrap_host", "disaggregated_params", "lora_path"):
        yield post(CHAT, chat(BROKEN, "hi", **{name: {"remote_host": "evil"}}), key=BAD)


def _stored(a: Attacker) -> Iterator[bytes]:
    for number in range(a.many(60)):
        body = {"model": BROKEN, "input": f"{number} " + "x" * a.size(6), "store": True}
        yield post(RESPONSES, json.dumps(body).encode(), key=BAD)


_NOT_GIVEN = frozenset({400}) | UNKNOWN
ATTACKS = (
    Attack("web pages on the data plane", UNKNOWN | {400, 421}, each(_pages), has_keys=False),
    Attack("metrics without a key", UNKNOWN, each(_metrics)),
    Attack("the admin API from outside", frozenset({401, 403}), each(_admin), has_keys=False),
    Attack("wrong keys", UNKNOWN, each(_wrong_keys)),
    Attack("3,000 names", ANY | {404}, each(names)),
    Attack("objects of another tenant", _NOT_GIVEN, each(_by_route)),
    Attack("fields that name objects of others", _NOT_GIVEN, each(_by_name)),
    Attack("fields between servers", frozenset({200, 400}), each(_between_servers)),
    Attack("60 responses of 6 MiB to keep", ANY, each(_stored, 8)),
)
