"""Which rule, or which change of a client, would have let more of recorded prompts come from cache.

Prompts are compared by their text, as if a cache kept all of it for ever: a rule is judged by what it makes
equal, not by the size of a cache. A prompt's blocks are cached from its beginning up to the first new one.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec

from proxy.replay.trace import ALL, TextBlocks, merged, read_file


class AdviceLine(msgspec.Struct):
    """A request of a recording, as far as advice needs it. `timestamp`: its arrival in milliseconds since the
    recording began. `client`: what sent it, by its own words."""

    input_length: Annotated[int, msgspec.Meta(ge=1)]
    session_id: str | int | None = None
    text: TextBlocks | None = None
    timestamp: float = 0.0
    client: str | None = None


class Saving(msgspec.Struct):
    """What a rule would have saved, or what a change of the client's cost at most: prompt tokens, estimated
    by their share of the text, and the requests that it concerns."""

    tokens: float = 0.0
    requests: int = 0

    def add(self, tokens: float) -> None:
        """Counts a request, if it gained something."""
        if tokens > 0:
            self.tokens += tokens
            self.requests += 1


class Advice(msgspec.Struct):
    """What a recording shows.

    Attributes:
        requests, tokens: those whose text is known, and their prompt tokens.
        unknown: requests without text: another route, or too long.
        alone: requests that name no session: only rules are judged by them.
        cached_tokens: tokens that a cache which keeps everything would have had.
        rules: rule → what it would have saved beyond that; the last is all rules together.
        clients: client → rule → what it would have saved of this client's prompts.
        changes: what the client changed between two requests of a session (tools, system, input) → what that
            cost at most.
    """

    requests: int = 0
    tokens: int = 0
    unknown: int = 0
    alone: int = 0
    cached_tokens: float = 0.0
    rules: dict[str, Saving] = {}
    clients: dict[str, dict[str, Saving]] = {}
    changes: dict[str, Saving] = {}


def advise(lines: Iterable[AdviceLine]) -> Advice:
    """What these requests, in their order, show."""
    advice = Advice()
    seen, seen_after = set[int](), dict[str, set[int]]()
    last = dict[str | int, TextBlocks]()
    for line in lines:
        text = line.text
        if text is None or not text.ids:
            advice.unknown += 1
            continue
        per_block = line.input_length / len(text.ids)
        advice.requests += 1
        advice.tokens += line.input_length
        cached = _leading(text.ids, seen)
        advice.cached_tokens += cached * per_block
        for name in text.changed.keys() - seen_after.keys():
            # Until now, the rule changed nothing: all prompts are the same with it.
            seen_after[name], advice.rules[name] = set(seen), Saving()
        for name, known in seen_after.items():
            ids = text.changed.get(name, text.ids)
            saved = (_leading(ids, known) - cached) * per_block
            advice.rules[name].add(saved)
            if line.client is not None and saved > 0:
                advice.clients.setdefault(line.client, {}).setdefault(name, Saving()).add(saved)
            known.update(ids)
        seen.update(text.ids)
        if line.session_id is None:
            advice.alone += 1
        elif (before := last.get(line.session_id)) is not None:
            _compare(advice, text, before, cached, per_block)
        if line.session_id is not None:
            last[line.session_id] = text
    advice.rules = _most_first(advice.rules)
    advice.clients = {client: _most_first(rules) for client, rules in sorted(advice.clients.items())}
    advice.changes = dict(sorted(advice.changes.items(), key=lambda item: -item[1].tokens))
    return advice


def _most_first(rules: dict[str, Saving]) -> dict[str, Saving]:
    """Rules by what they save; all of them together stand last."""
    order = sorted(rules, key=lambda name: (name == ALL, -rules[name].tokens, name))
    return {name: rules[name] for name in order}


def _compare(advice: Advice, now: TextBlocks, before: TextBlocks, cached: int, per_block: float) -> None:
    """Notes where a prompt leaves that of its session before it, if it does not only go on."""
    shortest = min(len(now.ids), len(before.ids))
    common = next((at for at in range(shortest) if now.ids[at] != before.ids[at]), shortest)
    if common < len(before.ids):
        ends = sorted(((now.tools, "tools"), (now.system, "system")))
        where = next((name for end, name in ends if common < end), "input")
        advice.changes.setdefault(where, Saving()).add((shortest - max(common, cached)) * per_block)


def _leading(ids: list[int], known: set[int]) -> int:
    """How many leading blocks are known."""
    return next((at for at, each in enumerate(ids) if each not in known), len(ids))


def read_recordings(*paths: Path) -> list[AdviceLine]:
    """The requests of recordings that kvpins made at one time, plain or gzip, in the order of their arrival.
    Raises TraceError, which says what is wrong where."""
    lines = merged(paths, [read_file(path, AdviceLine) for path in paths])
    return sorted(lines, key=lambda line: line.timestamp)
