"""What answers to requests say, and waits for what is to come."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import httpx

WAIT_S = 120.0
POLL_S = 0.02


def user(text: str) -> list[dict[str, Any]]:
    """A chat of one message."""
    return [{"role": "user", "content": text}]


def text_of(answer: httpx.Response) -> str:
    """The text of a chat's whole answer."""
    return answer.json()["choices"][0]["message"]["content"]


def texts_of(answer: httpx.Response) -> list[str]:
    """The text of each choice of an answer that ended well, whole or streamed; also of a response, and of
    SGLang's own route."""
    assert answer.status_code == httpx.codes.OK, answer.text
    events = [answer.text]
    if answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.text.endswith("data: [DONE]\n\n")
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    found: dict[int, str] = {}
    for event in map(json.loads, events):
        assert event.get("error") is None, answer.text
        for choice in event.get("choices", event.get("output", [event])):
            said = choice.get("message") or choice.get("delta") or choice
            text = said.get("text") or said.get("content") or ""
            index = choice.get("index", 0)
            found[index] = found.get(index, "") + "".join(
                each if isinstance(each, str) else each["text"] for each in text
            )
    return [found[index] for index in sorted(found)]


def cached(answer: httpx.Response) -> int:
    """The reused prompt tokens; checks that kvpin predicted them."""
    reported = answer.raise_for_status().json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert int(answer.headers["x-kvpin-predicted-tokens"]) == reported
    return reported


def until(holds: Callable[[], Any], what: str = "it", shown: Callable[[], Any] = str) -> Any:
    """Polls until `holds` is true, and returns what it then returned; else fails with what is `shown`."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if result := holds():
            return result
        time.sleep(POLL_S)
    raise AssertionError(f"{what} did not come to be: {shown()}")


async def becomes(holds: Callable[[], Any]) -> None:
    """`until`, for a test that runs in a loop."""
    await asyncio.to_thread(until, holds)
