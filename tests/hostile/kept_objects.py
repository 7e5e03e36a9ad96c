"""Objects of other tenants that engines keep, asked for by their routes and named in fields."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

from tests.hostile.attacker import ANY, UNKNOWN, Attack, Attacker, each
from tests.hostile.client import CHAT, RESPONSES, chat, head_of, post
from tests.hostile.place import BAD, BROKEN

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
    Attack("objects of another tenant", _NOT_GIVEN, each(_by_route)),
    Attack("fields that name objects of others", _NOT_GIVEN, each(_by_name)),
    Attack("fields between servers", frozenset({200, 400}), each(_between_servers)),
    Attack("60 responses of 6 MiB to keep", ANY, each(_stored, 8)),
)
