"""The screen of `kvpin top`: the last snapshot and the last requests, drawn to fit the terminal."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.text import Text

from proxy.cli.answer_tables import ready_engines
from proxy.cli.decisions import predicted
from proxy.cli.grid import Columns, TerminalTable, of_state

# Seconds that rates are taken over.
WINDOW_S = 10.0
# Requests that are kept; a terminal shows fewer.
_KEPT = 200
# Lines of titles, head and blank lines around both tables.
_OTHER_LINES = 8


_ENGINES: Columns = {
    "engine": "id",
    "model": "model",
    "state": lambda engine: of_state(engine["state"]),
    "view": lambda engine: of_state(engine["trust"]),
    "queue": lambda engine: f"{engine['queue_s']:.2f} s",
    "streams": "in_flight",
    "gpu": lambda engine: _filled(engine, "gpu"),
    "host": lambda engine: _filled(engine, "host"),
    "cached": lambda engine: _share(engine["reuse"]["delivered_tokens"], engine["reuse"]["prompt_tokens"]),
}
_REQUESTS: Columns = {
    "time": lambda request: time.strftime("%H:%M:%S", time.localtime(request["started"])),
    "engine": "engine",
    "status": lambda request: request["status"] or "…",
    "tokens": "n_tokens",
    "available": "available_tokens",
    "predicted": predicted,
    "reported": "reported_tokens",
    "first byte": lambda request: _ms(request["first_byte_s"]),
    "why": "why",
}


@dataclass(slots=True)
class TopView:
    """The state of the screen. `take` gets the events of `/admin/v1/events`; rich draws it. `problem`: why no
    events come; empty while they do."""

    url: str
    problem: str = ""
    _snapshot: dict[str, Any] | None = None
    _recent: deque[dict[str, Any]] = field(default_factory=deque)  # snapshots of the last WINDOW_S
    _requests: dict[str, dict[str, Any]] = field(default_factory=dict)  # newest last

    def take(self, name: str, event: dict[str, Any]) -> None:
        """Takes an event."""
        self.problem = ""
        if name == "snapshot":
            self._snapshot = event
            if self._recent and event["requests"] < self._recent[-1]["requests"]:
                self._recent.clear()  # kvpin was restarted
            self._recent.append(event)
            while event["at"] - self._recent[0]["at"] > WINDOW_S:
                self._recent.popleft()
        elif name in ("placed", "finished"):
            before = self._requests.pop(event["request_id"], {})
            self._requests[event["request_id"]] = {**event, "why": event["why"] or before.get("why")}
            while len(self._requests) > _KEPT:
                del self._requests[next(iter(self._requests))]

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        if self._snapshot is None:
            yield Text(self.problem or f"waiting for {self.url} …")
            return
        engines, requests = self._snapshot["engines"], list(self._requests.values())[::-1]
        room = options.height - _OTHER_LINES if options.height else len(engines) + len(requests)
        shown = engines[: max(room - min(len(requests), room // 2), 1)]
        requests = requests[: max(room - len(shown), 1)]
        yield Group(
            self._head(self._snapshot),
            Text(),
            TerminalTable.of(
                shown,
                _ENGINES,
                less=("host", "view", "model", "cached", "gpu"),
                numbers=("queue", "streams", "gpu", "host", "cached"),
            ).fitted(options.max_width),
            Text(f"and {len(engines) - len(shown)} more engines" if len(engines) > len(shown) else "", "dim"),
            TerminalTable.of(
                requests,
                _REQUESTS,
                less=("why", "available", "time", "predicted", "first byte"),
                numbers=("tokens", "available", "predicted", "reported", "first byte"),
            ).fitted(options.max_width)
            if requests
            else Text(_before(self._snapshot["requests"]), "dim"),
        )

    def _head(self, now: dict[str, Any]) -> Text:
        engines = now["engines"]
        ready = sum(engine["state"] == "ready" for engine in engines)
        elsewhere = sum(each["state"] == "elsewhere" and each["problem"] is None for each in engines)
        first = self._recent[0]
        seconds = now["at"] - first["at"]
        parts = [self.url, ready_engines(ready, len(engines), elsewhere)]
        if seconds:
            parts.append(f"{(now['requests'] - first['requests']) / seconds:.1f} requests/s")
        parts.append(f"{sum(now['waiting'].values())} waiting")
        names = ("prompt_tokens", "available_tokens", "delivered_tokens")
        prompt, available, delivered = (now["reuse"][name] - first["reuse"][name] for name in names)
        if prompt:
            parts.append(
                f"of prompt tokens {available / prompt:.0%} available, {delivered / prompt:.0%} reused"
            )
        parts.append(f"{now['reuse']['saved_s']:.1f} s of prefill saved")
        if not now["reuse_on"]:
            parts.append("reuse is off")
        head = Text(" · ".join(parts))
        if self.problem:
            head.append(f"\n{self.problem}", "red")
        return head


def _before(requests: int) -> str:
    """A line about the requests that ended before the watch began."""
    return f"{requests} requests so far: `kvpin requests` lists the last" if requests else "no requests yet"


def _filled(engine: dict[str, Any], tier: str) -> str:
    """Tokens held on a tier, and how full it is, where the engine tells its size."""
    held, room = engine["held_tokens"].get(tier), engine["capacity_tokens"].get(tier)
    if held is None:
        return ""
    return f"{held:,}" + (f" {held / room:.0%}" if room else "")


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else ""


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1000:.0f} ms"
