"""What two runs of one version may tell differently: each kind has a mask, and a reason."""

from __future__ import annotations

import re
import socket
from pathlib import Path

from tests.compare.world import ROOT, Transcript

MASKS: tuple[tuple[str, str, str], ...] = (
    # what, in its place, why
    (r"(?im)^date: .*$", "date: <date>", "libraries read the real clock"),
    (r'"timestamp": ?"[^"]*"', '"timestamp":"<time>"', "log lines have the real time"),
    (r"127\.0\.0\.1:\d+", "127.0.0.1:<port>", "engines listen on free ports"),
    (r"localhost:\d+", "localhost:<port>", "likewise"),
    (rf"\b{re.escape(socket.gethostname())}\b", "<host>", "the machine's name"),
    (r'"pid": ?\d+', '"pid":<pid>', "process ids"),
    (r"(?m)^kvpin_loop_lag_seconds.*\n?", "", "how late the event loop is depends on the machine"),
    (r"(?m)^kvpin_tenant_cpu_seconds_total.*\n?", "", "CPU time"),
    (r"(?m)^(kvpin_\w+_created|process_\w+|python_\w+)\b.*\n?", "", "times, memory and CPU of the process"),
    (r"(?m)^.*the event loop was blocked.*\n?", "", "likewise"),
    (r"(version=0\.0\.4(?:.*\n)+?content-length: )\d+", r"\1<n>", "the page of metrics has those lines"),
    (r'"unanswered": ?\d+', '"unanswered":<n>', "how often the events' replay was asked depends on the start"),
)  # fmt: skip
_IDS = re.compile(
    r"(?<![0-9A-Za-z])(?:[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{16,64})(?![0-9A-Za-z])"
)
_SALT = re.compile(r"\bkvpin-[0-9a-f]{32}\b")
_COMPILED = tuple((re.compile(pattern), text) for pattern, text, _ in MASKS)


def masked(transcript: Transcript, checkout: Path) -> Transcript:
    """The transcript of a version without what may differ. Ids are numbered within each case, tenants' salts
    throughout."""
    found: Transcript = {}
    salts: dict[str, str] = {}
    for case, parts in transcript.items():
        ids: dict[str, str] = {}

        def number(match: re.Match[str], ids: dict[str, str] = ids) -> str:
            return ids.setdefault(match[0], f"<id {len(ids) + 1}>")

        found[case] = {}
        for part, text in parts.items():
            for path in (str(checkout), str(ROOT)):
                text = text.replace(path, "<checkout>")  # noqa: PLW2901 - step by step
            for pattern, instead in _COMPILED:
                text = pattern.sub(instead, text)  # noqa: PLW2901
            text = _SALT.sub(lambda match: salts.setdefault(match[0], f"<salt {len(salts) + 1}>"), text)  # noqa: PLW2901
            found[case][part] = _IDS.sub(number, text)
    return found
