"""Placements of requests, and their reasons, as tables for people."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.text import Text

from proxy.cli.grid import Columns, TerminalTable, console
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
_RARE = ("room_s", "transfer_s", "stall_s", "again_s")
_MEANINGS = "others: requests after it wait; later: its next turns wait; regret: KV it evicts"
_OF_PAIRS = "transfer: KV moves; stall: streams and requests that its prefill delays"

# What a person can do about a miss.
_REMEDIES: Mapping[str, str] = {
    Miss.SYSTEM: "put what changes at the end of the prompt, or choose rules: `kvpin advise` says which",
    Miss.TOOLS: "send tools in a fixed order, or choose the rules tools_sorted and schemas_sorted",
    Miss.INPUT: "only append messages",
    Miss.OPTION: "keep this field for a conversation",
    Miss.TEMPLATE: "where the client leaves reasoning out, the rule reasoning_kept puts it back",
    Miss.KVPIN: "leave out the rule or repair that `kvpin requests ID` names",
    Miss.EVICTED: "more memory, a host tier, retention or a pin",
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
    "why": lambda request: _why(request, request["queued_s"], request["differs_at"]),
}


def show_route(route: dict[str, Any]) -> None:
    """Prints where a request would go."""
    out = console()
    out.print(f"would go to {route['engine']}: {route['why']}", markup=False)
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
    for miss in dict.fromkeys(request["miss"] for request in requests if request["error"] is None):
        if miss in _REMEDIES:
            out.print(f"{miss}: {_REMEDIES[miss]}", markup=False, style="dim")


def _rules(request: dict[str, Any]) -> list[str]:
    """The rules and repairs that changed its prompt."""
    rules: list[str] = request.get("normalised", [])
    return rules


def show_request(request: dict[str, Any]) -> None:
    """Prints one request and its explanation."""
    show_requests([request])
    out = console()
    out.print(request["explanation"], markup=False)
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
    if (
        request["stream"]
        and request["first_byte_s"] is not None
        and request["expected_first_token_s"] is not None
    ):
        expected = _ms(request["expected_first_token_s"])
        out.print(f"first token expected after {expected}, came after {_ms(request['first_byte_s'])}")
    if parts := request["first_byte_parts"]:
        spent = ", ".join(f"{name} {_ms(seconds)}" for name, seconds in parts.items())
        out.print(f"first byte {_ms(sum(parts.values()))} after the request came: {spent}", markup=False)


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
    numbers = ("cached", *map(_TERMS.__getitem__, shown))
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
    if "transfer_s" in shown or "stall_s" in shown:
        out.print(_OF_PAIRS, style="dim")


def _pair(prefiller: str | None, engine: str) -> str:
    """The engines of a request: the one that computes its prompt, if that is another one, and the one that
    answers."""
    return f"{prefiller} → {engine}" if prefiller else engine


def _prefiller(request: dict[str, Any]) -> str | None:
    """The engine whose KV another one used to answer a request."""
    return request["prefilled_by"] if request["transfer"] == "moved" else None


def _why(request: dict[str, Any], waited: float | None, at: str | None) -> str:
    """Text on a request: the seconds it waited for busy engines, and the engine whose KV was not used as it
    should; then the cause of its failure and the error, or why no more was reused, a mark if kvpin changed
    the prompt, and what differs first."""
    before = f"queued {waited:.1f} s; " if waited is not None else ""
    if request["prefilled_by"] is not None and _prefiller(request) is None:
        before += f"no KV from {request['prefilled_by']}: {request['transfer']}; "
    if request["error"] is not None:
        return f"{before}{request['cause']}: {request['error']}"
    mark = " *" if _rules(request) else ""
    return before + str(request["miss"] or "") + mark + (f": {at}" if at is not None else "")


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1000:.1f} ms"


def _milliseconds(seconds: float | None) -> str:
    """A term of a cost; a dash where it was not computed."""
    if seconds is None:
        return "–"
    figures = 1 if 0 < seconds < 0.01 else 0  # noqa: PLR2004 - rounding
    return f"{seconds * 1000:,.{figures}f}"


def _bold(text: str, is_bold: bool) -> Text:
    return Text(text, "bold" if is_bold else "")
