"""The text of a prompt as hashes, as the engine got it and as rules would make it, for `kvpin advise`.

An id is a keyed hash of a block of 256 bytes and of all bytes before it. The bytes are those of the tools,
the system prompt and the conversation, in the order in which the chat template writes them. A block ends
where the tools or the system prompt end.
Marks for the cache are left out: no prompt contains them.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import msgspec

from proxy.core.normalise import Fields, Rule, normalised, prompt_parts
from proxy.replay.recorded import ALL, TextBlocks

BLOCK_BYTES = 256
_MARKS = frozenset({"cache_control", "prompt_cache_breakpoint", "id", "status"})


def text_blocks(fields: Fields, keyed: Callable[[], blake2b], *, is_system_first: bool = False) -> TextBlocks:
    """The blocks of a prompt with these fields. `keyed` begins a hash of 8 bytes. `is_system_first`: the chat
    template writes the system prompt before the tools."""
    ids, ends = _hashed(fields, keyed, is_system_first=is_system_first)
    found = TextBlocks(ids, *ends, {})
    for name, rules in (*((rule.value, (rule,)) for rule in Rule), (ALL, tuple(Rule))):
        changes, applied, _ = normalised(fields, rules)
        if applied:
            now = {**fields, **changes}
            found.changed[name], _ = _hashed(now, keyed, is_system_first=is_system_first)
    return found


def _hashed(
    fields: Fields, keyed: Callable[[], blake2b], *, is_system_first: bool
) -> tuple[list[int], tuple[int, int]]:
    """The ids of a prompt, and how many there are up to the end of its tools and of its system prompt."""
    hashed = keyed()
    ids: list[int] = []
    ends: list[int] = []
    tools, system, rest = prompt_parts(fields)
    for part in (system, tools, rest) if is_system_first else (tools, system, rest):
        text = b"".join(map(_plain, part))
        for at in range(0, len(text), BLOCK_BYTES):
            hashed.update(text[at : at + BLOCK_BYTES])
            ids.append(int.from_bytes(hashed.digest(), "little"))
        ends.append(len(ids) if part else 0)
    if len(text) % BLOCK_BYTES:
        del ids[-1]
    return ids, (ends[1], ends[0]) if is_system_first else (ends[0], ends[1])


def _plain(item: Any) -> bytes:  # noqa: ANN401 - JSON
    """An item of a prompt, without what no prompt contains. A single text is a text, also as a part."""
    if not isinstance(item, dict):
        return msgspec.json.encode(item)
    kept = _unmarked(item)
    if isinstance(content := kept.get("content"), list):
        content = [_unmarked(part) for part in content]
        match content:
            case [{"type": "text" | "input_text" | "output_text", "text": str(text), **rest}] if not rest:
                content = text
        kept["content"] = content
    return msgspec.json.encode(kept)


def _unmarked(part: Any) -> Any:  # noqa: ANN401 - JSON
    if not isinstance(part, dict):
        return part
    return {name: value for name, value in part.items() if name not in _MARKS}
