"""Placements of requests, and their reasons, as tables for people; the screen of `kvpin top`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, cast

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.text import Text

from proxy.cli.answer_tables import ready_engines
from proxy.cli.grid import Columns, TerminalTable, console, of_state
from proxy.core.misses import Miss

# The terms of a cost and the titles of their columns. They fit into 80 characters without `_RARE`, which are
# shown only where one of them is not zero.
_TERMS = {
    "queue_s": "queue",
    "room_s": "room",
    "restore_s": "restore",
    "prefill_s": "prefill",
    "transfer_s": "transfer",
    "interference_s": "decode",
    "stall_s": "stall",
    "congestion_s": "others",
    "later_s": "later",
    "again_s": "again",
    "regret_s": "regret",
    "total_s": "total",
}
# Shown, and explained, where an engine has one.
_RARE: Mapping[str, str] = {
    "room_s": "room: until there is memory for it",
    "transfer_s": "transfer: KV moves",
    "stall_s": "stall: streams and requests that its prefill delays",
    "again_s": "again: the next prompt with this beginning is computed once more",
}
_MEANINGS = "others: requests after it wait; later: its next turns wait; regret: KV it evicts"

# What a person can do about a miss.
_REMEDIES: Mapping[str, str] = {
    Miss.SYSTEM: (
        "put what changes at the end of the prompt, or choose rules: `kvpin advise` says which, from a "
        "recording (`kvpin serve --record-traffic FILE`)"
    ),
    Miss.TOOLS: "send tools in a fixed order, or choose the rules tools_sorted and schemas_sorted",
    Miss.INPUT: "only append messages",
    Miss.OPTION: "keep this field for a conversation",
    Miss.TEMPLATE: "where the client leaves reasoning out, the rule reasoning_kept puts it back",
    Miss.KVPIN: "leave out the rule or repair that `kvpin requests ID` names",
    Miss.EVICTED: "more memory, a host tier, retention or a pin, unless it was flushed",
    Miss.WINDOW: "more memory",
    Miss.STATE: "more memory",
}

# A file has room for all columns of a request.
_LINE_WIDTH = 280


def predicted(request: dict[str, Any]) -> str | None:
    """The prediction for a request, with a mark if it is not firm."""
    tokens = request["predicted_tokens"]
    return None if tokens is None else f"{'' if request['is_firm'] is not False else '~'}{tokens}"


_REQUESTS: Columns = {
    "UTC": lambda request: f"{datetime.fromtimestamp(request['started'], UTC):%H:%M:%S}",
    "request": "request_id",
    "tenant": lambda request: request["tenant"] or "–",
    "model": lambda request: request["model"] or "–",
    "route": "route",
    "engine": lambda request: _pair(_prefiller(request), request["engine"]),
    "status": "status",
    "tokens": "n_tokens",
    "predicted": predicted,
    "cached": "reported_tokens",
    "first byte": lambda request: _ms(request["first_byte_s"]),
    "took": lambda request: _ms(request["duration_s"]),
    "why": lambda request: _why(request),  # noqa: PLW0108 - it is defined below
}


def show_route(route: dict[str, Any]) -> None:
    """Prints where a request would go."""
    out = console()
    out.print(f"would go to {route['engine']}: {route['why']}", markup=False)
    if route.get("note"):
        out.print(route["note"], markup=False)
    if route["is_firm"] is False:
        out.print(f"{route['engine']} may reuse another number of tokens: its prediction is not firm")
    _show_costs(out, route, route["candidates"], route["engine"], route["n_tokens"])


def show_list(answer: dict[str, Any]) -> None:
    """Prints one row per request, and where the records of others are."""
    show_requests(answer["requests"])
    for name, count in answer["passed_on"].items():
        console().print(
            f"{count} requests were answered by the kvpin {name}, which has their records", markup=False
        )


def show_requests(requests: list[dict[str, Any]]) -> None:
    """Prints one row per request; below, what the marks mean, and what can be done about their misses."""
    less, out = (
        ("route", "predicted", "first byte", "tokens", "took", "model", "tenant"),
        console(_LINE_WIDTH),
    )
    TerminalTable.of(requests, _REQUESTS, text="why", less=less).print(out)
    if rules := sorted({rule for request in requests for rule in _rules(request)}):
        out.print(f"* kvpin changed the prompt: {', '.join(rules)}", markup=False, style="dim")
    if any((predicted(request) or "").startswith("~") for request in requests):
        out.print("~ not firm: the engine may reuse another number of tokens", style="dim")
    for miss in dict.fromkeys(request["miss"] for request in requests if request["error"] is None):
        if miss in _REMEDIES:
            out.print(f"{miss}: {_REMEDIES[miss]}", markup=False, style="dim")


def _rules(request: dict[str, Any]) -> list[str]:
    """The rules and repairs that changed its prompt."""
    return cast("list[str]", request.get("normalised", []))


def show_request(request: dict[str, Any]) -> None:
    """Prints one request and its explanation."""
    show_requests([request])
    out = console()
    out.print(request["explanation"], markup=False)
    if request.get("note"):
        out.print(request["note"], markup=False)
    divergence = request["divergence"]
    if divergence is not None and divergence["text"] is not None:
        at, other = divergence["common_tokens"], divergence["request_id"]
        if divergence["text"] and divergence["other_text"] == "":
            out.print(f"request {other} had its first {at} tokens as its prompt", markup=False)
        elif divergence["text"] or divergence["other_text"]:
            out.print(f"from token {at} on:  {divergence['text']!r}", markup=False)
            out.print(f"request {other}:  {divergence['other_text']!r}", markup=False)
        else:
            out.print(f"request {other} had the same prompt")
    decision = request["decision"]
    if decision is not None:
        out.print(f"\nplaced on {request['engine']}: {decision['why']}", markup=False)
        _show_costs(out, decision, decision["costs"], request["engine"], request["n_tokens"])
    expected, came = _ms(request["expected_first_token_s"]), _ms(request["first_byte_s"])
    if request["stream"] and expected and came:
        out.print(f"first token expected after {expected}, came after {came}")
    if parts := request["first_byte_parts"]:
        spent = ", ".join(f"{name} {_ms(seconds)}" for name, seconds in parts.items())
        what = "first byte" if request["stream"] else "answer"
        out.print(f"{what} {_ms(sum(parts.values()))} after the request came: {spent}", markup=False)


def _show_costs(
    out: Console, decision: dict[str, Any], costs: list[dict[str, Any]], chosen: str, n_tokens: int | None
) -> None:
    """Prints the terms of each engine's cost, in milliseconds."""
    if decision["rule"] == "least loaded":
        table = TerminalTable(("engine", "in flight"))
        for cost in costs:
            table.add(_bold(cost["engine"], cost["engine"] == chosen), cost["in_flight"])
        table.print(out)
        return
    shown = [name for name in _TERMS if name not in _RARE or any(cost.get(name) for cost in costs)]
    numbers = ("cached", *(_TERMS[name] for name in shown))
    table = TerminalTable(("engine", *numbers), numbers=numbers, gap=1)
    costs = sorted(costs, key=lambda cost: (cost["engine"] != chosen, cost["total_s"]))
    best = costs[0]
    for cost in costs:
        terms = (_milliseconds(cost[name]) for name in shown)
        pair = _pair(cost.get("prefiller"), cost["engine"])
        table.add(_bold(pair, cost is best), f"{cost['cached_tokens']:,}", *terms)
    table.print(out)
    strain = f"{decision['utilisation']:.0%} utilisation, prefill counts {decision['strain']:.1f} times"
    out.print(f"tokens of {n_tokens}; milliseconds; {strain}", style="dim")
    out.print(_MEANINGS, style="dim")
    if rare := [_RARE[name] for name in shown if name in _RARE]:
        out.print("; ".join(rare), style="dim")


def _pair(prefiller: str | None, engine: str) -> str:
    """The engines of a request: the one that computes its prompt, if that is another one, and the one that
    answers."""
    return f"{prefiller} → {engine}" if prefiller else engine


def _prefiller(request: dict[str, Any]) -> str | None:
    """The engine whose KV another one used to answer a request."""
    return request["prefilled_by"] if request["transfer"] == "moved" else None


def _why(request: dict[str, Any]) -> str:
    """Text on a request: the seconds it waited for busy engines, and the engine whose KV was not used as it
    should; then the cause of its failure and the error, or why no more was reused, a mark if kvpin changed
    the prompt, and what differs first."""
    waited, at = request["queued_s"], request["differs_at"]
    before = f"queued {waited:.1f} s; " if waited is not None else ""
    if request["prefilled_by"] is not None and _prefiller(request) is None:
        before += f"no KV from {request['prefilled_by']}: {request['transfer']}; "
    if request["error"] is not None:
        return f"{before}{request['cause']}: {request['error']}"
    mark = " *" if _rules(request) else ""
    return before + str(request["miss"] or "") + mark + (f": {at}" if at is not None else "")


def _ms(seconds: float | None, digits: int = 1) -> str:
    return "" if seconds is None else f"{seconds * 1000:.{digits}f} ms"


def _milliseconds(seconds: float | None) -> str:
    """A term of a cost; a dash where it was not computed."""
    if seconds is None:
        return "–"
    figures = 1 if 0 < seconds < 0.01 else 0  # noqa: PLR2004 - rounding
    return f"{seconds * 1000:,.{figures}f}"


def _bold(text: str, is_bold: bool) -> Text:
    return Text(text, "bold" if is_bold else "")


# --- the screen of `kvpin top`: the last snapshot and the last requests, drawn to fit the terminal ------

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
_LAST_REQUESTS: Columns = {
    "time": lambda request: time.strftime("%H:%M:%S", time.localtime(request["started"])),
    "engine": "engine",
    "status": lambda request: request["status"] or "…",
    "tokens": "n_tokens",
    "available": "available_tokens",
    "predicted": predicted,
    "reported": "reported_tokens",
    "first byte": lambda request: _ms(request["first_byte_s"], 0),
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
                _LAST_REQUESTS,
                less=("why", "available", "time", "predicted", "first byte"),
                numbers=("tokens", "available", "predicted", "reported", "first byte"),
            ).fitted(options.max_width)
            if requests
            else Text(_before(self._snapshot["requests"]), "dim"),
        )

    def _head(self, now: dict[str, Any]) -> Text:
        engines = now["engines"]
        ready = sum(engine["state"] == "ready" for engine in engines)
        elsewhere = sum(each["state"] == "elsewhere" and each["last_error"] is None for each in engines)
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
