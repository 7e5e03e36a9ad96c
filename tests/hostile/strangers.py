"""Clients without a key or with a wrong one, web pages, and clients that take ever new names."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

from tests.hostile.attacker import ANY, UNKNOWN, Attack, Attacker, each
from tests.hostile.client import CHAT, chat, head_of, post
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


ATTACKS = (
    Attack("web pages on the data plane", UNKNOWN | {400, 421}, each(_pages), has_keys=False),
    Attack("metrics without a key", UNKNOWN, each(_metrics)),
    Attack("the admin API from outside", frozenset({401, 403}), each(_admin), has_keys=False),
    Attack("wrong keys", UNKNOWN, each(_wrong_keys)),
    Attack("3,000 names", ANY | {404}, each(names)),
)
