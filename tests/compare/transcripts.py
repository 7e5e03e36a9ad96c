"""Transcripts: what one version did, what of that may differ from run to run, and what differs."""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Iterator, Sequence
from difflib import unified_diff
from pathlib import Path

Transcript = dict[str, dict[str, str]]
"""Case → what is seen of it (by clients, by engines, in records, in the log) → text."""

MASKS: tuple[tuple[str, str, str], ...] = (
    # what is masked, what stands in its place, and why
    (r"(?im)^date: .*$", "date: <date>", "libraries read the real clock"),
    (r'"timestamp": ?"[^"]*"', '"timestamp":"<time>"', "likewise, in log lines"),
    (r"(127\.0\.0\.1|localhost):\d+", r"\1:<port>", "engines listen on free ports"),
    (r'"pid": ?\d+', '"pid":<pid>', "process ids"),
    (r"(?m)^kvpin_loop_lag_seconds.*\n?", "", "how late the event loop is depends on the machine"),
    (r"(?m)^.*the event loop was blocked.*\n?", "", "likewise"),
    (r"(?m)^(kvpin_tenant_cpu_seconds_total|process_|python_).*\n?", "", "CPU time and memory"),
    (r"(version=0\.0\.4(?:.*\n)+?content-length: )\d+", r"\1<n>", "the page of metrics has these lines"),
    (r'content-length: \d+(?=\n(?:.*\n)*.*"unanswered")', "content-length: <n>", "because of the next one"),
    (r'"unanswered": ?\d+', '"unanswered":<n>', "how often old events were asked for depends on the start"),
    (r"(?m)^:\n\n", "", "signs of life in a translated stream depend on the pieces in which it came"),
    (r'(?m)^.*"event": "tokenizer (is not checked|gives the engine).*\n?', "", "loaded in the background"),
    (r'version="[^"]*"', 'version="<version>"', "each release has its own"),
)  # fmt: skip
_COMPILED = tuple((re.compile(pattern), instead) for pattern, instead, _ in MASKS)
_SALT = re.compile(r"\bkvpin-[0-9a-f]{32}\b")
_ID = re.compile(
    r"(?<![0-9A-Za-z.])([0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{16,64})(?![0-9A-Za-z])"
)


def masked(transcript: Transcript, checkouts: Sequence[Path]) -> Transcript:
    """The transcript without what may differ, and without the paths of these checkouts. Random ids are
    numbered within each case, tenants' salts throughout: which of them are equal is compared."""
    found: Transcript = {}
    salts: dict[str, str] = {}
    for case, parts in transcript.items():
        ids: dict[str, str] = {}
        found[case] = {part: _masked(text, checkouts, salts, ids) for part, text in parts.items()}
    return found


def _masked(text: str, checkouts: Sequence[Path], salts: dict[str, str], ids: dict[str, str]) -> str:
    for path in checkouts:
        text = text.replace(str(path), "<checkout>")
    for pattern, instead in _COMPILED:
        text = pattern.sub(instead, text)
    text = _SALT.sub(lambda found: salts.setdefault(found[0], f"<salt {len(salts) + 1}>"), text)
    return _ID.sub(lambda found: ids.setdefault(found[0], f"<id {len(ids) + 1}>"), text)


def differences(old: Transcript, new: Transcript) -> Iterator[str]:
    """A unified diff of each part of each case that differs, line by line."""
    for case in dict.fromkeys((*old, *new)):
        before, after = old.get(case, {}), new.get(case, {})
        for part in dict.fromkeys((*before, *after)):
            lines = (side.get(part, "").splitlines() for side in (before, after))
            title = f"{case}, {part}"
            yield from unified_diff(*lines, f"{title}, old", f"{title}, new", n=2, lineterm="")


def write(file: Path, transcript: Transcript) -> None:
    """Writes a transcript, compressed."""
    file.write_bytes(lzma.compress(json.dumps(transcript).encode(), preset=9))


def read(file: Path) -> Transcript:
    """Reads one."""
    return json.loads(lzma.decompress(file.read_bytes()))
