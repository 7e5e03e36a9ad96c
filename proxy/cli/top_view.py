"""The screen of `kvpin top`: the last snapshot and the last requests, drawn to fit the terminal."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.text import Text

from proxy.cli.grid import Grid, of_count, of_state

# Seconds that rates are taken over.
WINDOW_S = 10.0
# Requests that are kept; a terminal shows fewer.
_KEPT = 200
# Lines of titles, head and blank lines around both tables.
_OTHER_LINES = 8


@dataclass(slots=True)
class TopView:
    """The state of the screen. `take` gets the events of `/admin/v1/events`; rich draws it.

    Attributes:
        url: the kvpin it watches.
        problem: why no events come; empty while they do.
    """

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
            self._engines(shown).fitted(options.max_width),
            Text(f"and {len(engines) - len(shown)} more engines" if len(engines) > len(shown) else "", "dim"),
            self._table(requests).fitted(options.max_width)
            if requests
            else Text(_before(self._snapshot["requests"]), "dim"),
        )

    def _head(self, now: dict[str, Any]) -> Text:
        ready = sum(engine["state"] == "ready" for engine in now["engines"])
        first = self._recent[0]
        seconds = now["at"] - first["at"]
        parts = [self.url, f"{ready} of {len(now['engines'])} engines ready"]
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

    @staticmethod
    def _engines(engines: list[dict[str, Any]]) -> Grid:
        table = Grid(
            ("engine", "model", "state", "view", "queue", "streams", "gpu", "host", "cached"),
            less=("host", "view", "model", "cached", "gpu"),
            numbers=("queue", "streams", "gpu", "host", "cached"),
        )
        for engine in engines:
            reuse = engine["reuse"]
            table.add(
                engine["id"],
                engine["model"] or "",
                of_state(engine["state"]),
                of_state(engine["trust"]),
                f"{engine['queue_s']:.2f} s",
                str(engine["in_flight"]),
                _filled(engine, "gpu"),
                _filled(engine, "host"),
                _share(reuse["delivered_tokens"], reuse["prompt_tokens"]),
            )
        return table

    @staticmethod
    def _table(requests: list[dict[str, Any]]) -> Grid:
        table = Grid(
            ("time", "engine", "status", "tokens", "available", "predicted", "reported", "first byte", "why"),
            less=("why", "available", "time", "predicted", "first byte"),
            numbers=("tokens", "available", "predicted", "reported", "first byte"),
        )
        for request in requests:
            first_byte = request["first_byte_s"]
            table.add(
                time.strftime("%H:%M:%S", time.localtime(request["started"])),
                request["engine"] or "",
                str(request["status"] or "…"),
                of_count(request["n_tokens"]),
                of_count(request["available_tokens"]),
                of_count(request["predicted_tokens"]),
                of_count(request["reported_tokens"]),
                "" if first_byte is None else f"{first_byte * 1000:.0f} ms",
                request["why"] or "",
            )
        return table


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
