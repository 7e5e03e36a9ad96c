"""Two tenants on every route of a real server: what it reuses, for the second, of what the first sent.

The routes are those of the server's own OpenAPI document, so that a route of a newer version is tried, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx

from tests.live.server_world import MODEL, WAIT_S, ServerWorld

TENANTS = ("red", "blue")
KEYS = tuple(f"--api-key=key-of-{tenant}" for tenant in TENANTS)
"""Flags of `kvpin serve`."""
_TEXT = "Nobody else may learn what the harbour master wrote about the tide that night. " * 8


@dataclass(slots=True)
class Reuse:
    """Prompt tokens that the server reused on a route.

    Attributes:
        again: for the tenant that had sent the same before.
        other: for the other tenant, who had not. Any is a leak.
        statuses: of all answers.
    """

    again: int = 0
    other: int = 0
    statuses: set[int] = field(default_factory=set)


def reuse_by_route(world: ServerWorld, counter: str) -> dict[str, Reuse]:
    """Sends all kinds of prompts on all routes, as one tenant twice, then as the other.

    `counter`: name of the server's metric of reused prompt tokens.
    """
    (server,), base = world.servers, world.kvpin.base_url.removesuffix("/v1")

    def reused() -> int:
        page = httpx.get(f"{server.url}/metrics", timeout=WAIT_S, trust_env=False).text
        return int(sum(map(float, re.findall(rf"^{counter}(?:{{.*}})? (\S+)$", page, re.MULTILINE))))

    paths = httpx.get(f"{server.url}/openapi.json", timeout=WAIT_S, trust_env=False).json()["paths"]
    found = dict[str, Reuse]()
    for path in sorted(path for path, methods in paths.items() if "post" in methods):
        seen = found[path] = Reuse()
        for n, body in enumerate(_bodies(path)):
            counts = [reused()]
            for tenant in ("red", "red", "blue"):
                headers = {"authorization": f"Bearer key-of-{tenant}"}
                url = base + re.sub(r"{.*?}", f"x{n}", path)
                answer = httpx.post(url, json=body, headers=headers, timeout=WAIT_S, trust_env=False)
                seen.statuses.add(answer.status_code)
                counts.append(reused())
                if answer.is_error and tenant == "red":
                    break
            seen.again += counts[2] - counts[1] if len(counts) > 2 else 0
            seen.other += counts[3] - counts[2] if len(counts) > 3 else 0
    return found


def _bodies(path: str) -> Iterator[dict[str, object]]:
    """Bodies of all kinds that routes take, each with a text of its own."""
    kinds = ("prompt", "list", "messages", "input", "text", "texts", "query")
    for kind in kinds:
        text = f"On {path} as {kind}: {_TEXT}"
        talk = [{"role": "user", "content": text}]
        fields: dict[str, dict[str, object]] = {
            "prompt": {"prompt": text},
            "list": {"prompt": [text, f"Then {text}"]},
            "messages": {"messages": talk, "max_tokens": 2},
            "input": {"input": text, "max_output_tokens": 2},
            "text": {"text": text, "sampling_params": {"max_new_tokens": 2}},
            "texts": {
                "text_1": text,
                "text_2": text,
                "queries": text,
                "items": [text],
                "label_token_ids": [1],
            },
            "query": {"query": text, "documents": [text], "items": [text], "label_token_ids": [1]},
        }
        limit = {"max_tokens": 2} if kind in ("prompt", "list") else {}
        yield {"model": MODEL, **fields[kind], **limit}


def told(found: dict[str, Reuse]) -> list[str]:
    """Lines about the routes."""
    return [
        f"{path}: {sorted(reuse.statuses)}, reused by its tenant {reuse.again}, by the other {reuse.other}"
        for path, reuse in found.items()
    ]
