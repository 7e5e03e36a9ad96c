"""Finds the values in an instruction that differ from session to session: paths, dates, times, ids, counts.

A value is found by its own shape, wherever it stands. A few have none: the words beside them tell. It becomes
a reference, `[[path 1]]`. The text around it stays as it is, so that it is equal in all sessions. The prompt
tells the value once, further back. What a model writes of a reference becomes the value again
(`proxy/request/values_back.py`), so no client ever gets one.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence

Find = Callable[[str], Iterator[tuple[int, int]]]
"""Finds values in a line: where each begins and ends."""
Kinds = Mapping[str, Sequence[Find]]
"""Kind → how its values are found."""

# One call of a pattern keeps the interpreter's lock, so it sees only the beginning of a line: a chat of 8 MB
# in one line took 10.8 s. Patterns of a shape are linear. Patterns of words are not, and see less.
LINE = 4096
"""Characters of each line in which values are found by their shape."""
HEAD = 512
"""Characters of each line in which they are found by words."""
_MOST_LINES = 200_000  # an empty line takes as long as 1 KiB of text
REFERENCE = re.compile(r"\[\[(?:path|date|time|id|count|git) \d{1,6}\]\]")
_REFERENCE_BYTES = re.compile(REFERENCE.pattern.encode())
_MOST_BYTES, _PIECE = 16, 1 << 16  # of a reference, and of what is searched at once
HALF_REFERENCE = re.compile(r"\[(?:\[(?:[a-z]{1,5}(?: (?:\d{1,6}\]?)?)?)?)?\Z")
"""The beginning of a reference, at the end of a text."""

_DAY = r"\d{4}-\d{2}-\d{2}"
_WEEKDAY = r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]{0,6}"
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]{0,6}"
TIME = r"\d{2}:\d{2}(?::\d{2}(?:[.,]\d{1,9})?)?(?: ?(?:[AP]M))?(?: ?(?:Z|UTC|GMT|[+-]\d{2}:?\d{2})(?!\w))?"
# 2026-11-25T23:05:44.1Z, and 2026-11-25 23:05.
ISO_TIME = re.compile(rf"(?<!\d)({_DAY})(?:T|, | at | ){TIME}(?![\d:])")
# Wed, 25 Nov 2026 23:05:44 GMT, and Wed Nov 25 23:05:44 UTC 2026.
WORDY_TIME = re.compile(
    rf"\b({_WEEKDAY},? (?:\w{{3,9}} +\d{{1,2}}|\d{{1,2}} \w{{3,9}})(?:,? \d{{4}})?),? {TIME}(?![\d:])"
)
_CLOCK = re.compile(r"(?<![\d:])\d{2}:\d{2}:\d{2}(?![\d:])")
_DATES = tuple(
    re.compile(pattern + r"(?!\w|[-/.]\d|,?(?:T| at | )\d{1,2}:\d)")
    for pattern in (
        rf"(?<![\w/.-]){_DAY}",
        r"(?<![\w/.-])\d{1,2}/\d{1,2}/\d{4}",
        r"(?<![\w/.-])\d{1,2}\.\d{1,2}\.\d{4}",
        rf"\b(?:{_WEEKDAY},? )?{_MONTH} \d{{1,2}}(?:st|nd|rd|th)?,? \d{{4}}",
        rf"\b(?:{_WEEKDAY},? )?\d{{1,2}}(?:st|nd|rd|th)? {_MONTH},? \d{{4}}",
    )
)
# A day of the week belongs to its date: 2026-11-29 (Sunday).
_DAY_BEHIND = re.compile(rf",? \(?{_WEEKDAY}\b\)?")
_IDS = (
    re.compile(r"(?<![\w-])[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}(?![\w-])"),
    re.compile(r"(?<![\w-])[0-9a-f]{32,64}(?![\w-])"),
)
_DIGIT, _YEAR, _MINUTES, _LONG = map(re.compile, (r"\d", r"\d{4}", r"\d:\d\d", r"[0-9a-fA-F]{8}"))
_NAMES = r"[\w.@+~%#=&$!-]+"
# Begins with its first literal character, which `re` finds as fast as `str.find`.
_PATH = re.compile(rf"/(?<![\w/\\.:~*)\]}}-]/){_NAMES}(?:/{_NAMES})*")
_FILE_URL = re.compile(rf"(?<=file://)/{_NAMES}(?:/{_NAMES})*")
_WINDOWS_PATH = re.compile(rf"(?<![\w/])[A-Za-z]:(?:[\\/]{{1,2}}{_NAMES})+")
# Where people's files lie. Others are found by the words before them, or below a path that was found.
_ROOT = re.compile(
    r"/(?:home|Users|root|tmp|private|Volumes|mnt|media|data|scratch|storage|srv|workspaces?|worktrees?|work"
    r"|projects?|repos?|code|src|var/(?:folders|tmp|www))/."
)
_EXAMPLE = "/path/to"
_PLACE = re.compile(
    r"(?:director(?:y|ies)|folder|cwd|workspace|worktree|root|path)(?:[\s:=*`'\"(]|\bis\b){1,8}$",
    re.IGNORECASE,
)
_SENTENCE_ENDS = ".!"
_MOST_LEVELS = 32
_MOST_END = LINE - 2  # what the bound may have cut stays whole
_BEFORE = 40  # characters before a path that may say what it is
_TIME_LINE = re.compile(
    r"^\W*(?:the )?(?:(?:current|today'?s|local)[ _-]*(?:date|time|day|datetime|timestamp)"
    r"|date|time|timestamp|now|today)\b[^\n:=]{0,20}?(?:[:=]|\bis\b)[\s*]*",
    re.IGNORECASE,
)
_TELLS_TIME = re.compile(rf"\d|{_WEEKDAY}|{_MONTH}")
# A count: "tokens used: 1,234 left". One pattern of all three took 3.4 s for 1 MB of such words.
_COUNTED = re.compile(r"\b(?:tokens?|context|usage|budget)\b", re.IGNORECASE)
_LEFT = re.compile(r"\b(?:left|remaining|used)\b", re.IGNORECASE)
_TO_DIGIT, _TO_LEFT = 60, 21  # characters between them, at most
_CODE = re.compile(r"\w\(|\$\{")  # a number in a program is none that changes
_NUMBER = re.compile(r"\d[\d,.]*(?<=\d)")
_GIT_LINE = re.compile(r"^\W*(?:git status|current branch)\b[^\n:]{0,20}:\s*", re.IGNORECASE)
GIT = "gitStatus:"  # Claude Code ends its system prompt with it


def has_reference(text: bytes) -> bool:
    """True if a text has something that looks like a reference."""
    if b"[[" not in text:
        return False
    search = _REFERENCE_BYTES.search
    return any(search(text, at, at + _PIECE + _MOST_BYTES) for at in range(0, len(text), _PIECE))


class References:
    """The values that were found in a prompt, each with its reference."""

    def __init__(self) -> None:
        self.told: dict[str, str] = {}  # reference → value, in the order of the prompt
        self._of: dict[tuple[str, str], str] = {}
        self._counts: dict[str, int] = {}
        self._lines_left = _MOST_LINES

    def of(self, kind: str, value: str) -> str:
        """The reference of a value; the same one wherever the value stands."""
        if (reference := self._of.get((kind, value))) is None:
            self._counts[kind] = number = self._counts.get(kind, 0) + 1
            reference = self._of[kind, value] = f"[[{kind} {number}]]"
            self.told[reference] = value
        return reference

    def replaced(self, text: str, kinds: Kinds) -> str:
        """A text whose values are references. The rest of a prompt of very many lines stays as it is."""
        lines = text.split("\n")
        for at, line in enumerate(lines):
            if self._lines_left <= 0:
                break
            self._lines_left -= 1
            if not line or line.isspace():
                continue
            if (
                "git" in kinds
                and line.startswith(GIT)
                and (rest := "\n".join(lines[at:])[len(GIT) :].strip())
            ):
                return "\n".join([*lines[:at], f"{GIT} {self.of('git', rest)}"])
            for kind, finds in kinds.items():
                for find in finds:
                    lines[at] = self._in_line(lines[at], kind, find)
        return "\n".join(lines)

    def lines(self, order: Sequence[str]) -> list[str]:
        """A line for each value, by kind. Paths of programs come first: they are equal in all directories."""

        def rank(item: tuple[str, str]) -> tuple[int, bool]:
            return order.index(item[0][2:].partition(" ")[0]), "/." not in item[1]

        return [f"{reference}: {value}" for reference, value in sorted(self.told.items(), key=rank)]

    def _in_line(self, line: str, kind: str, find: Find) -> str:
        end = 0
        pieces: list[str] = []
        for start, stop in sorted(find(line)):
            value = line[start:stop]
            if start >= end and "[[" not in value:
                pieces += (line[end:start], self.of(kind, value))
                end = stop
        return "".join([*pieces, line[end:]]) if end else line


def _by(*patterns: re.Pattern[str], needs: re.Pattern[str], behind: re.Pattern[str] | None = None) -> Find:
    """Finds what patterns match, with what matches behind it. Few lines have what they all need."""

    def find(line: str) -> Iterator[tuple[int, int]]:
        if needs.search(line, 0, LINE) is None:
            return
        for pattern in patterns:
            for found in pattern.finditer(line, 0, LINE):
                stop = found.end()
                if behind is not None and (more := behind.match(line, stop, LINE)) is not None:
                    stop = more.end()
                if stop < LINE:  # what the bound cuts stays whole
                    yield found.start(), stop

    return find


def _rest(start: re.Pattern[str], *, if_it: re.Pattern[str] | None = None) -> Find:
    """Finds the rest of a line that begins so."""

    def find(line: str) -> Iterator[tuple[int, int]]:
        found, stop = start.match(line, 0, HEAD), len(line.rstrip())
        if found is None or not found.end() < stop <= HEAD:
            return
        if if_it is None or if_it.search(line, found.end(), stop) is not None:
            yield found.end(), stop

    return find


def _counts(line: str) -> Iterator[tuple[int, int]]:
    if _CODE.search(line, 0, HEAD) is None and _tells_count(line):
        yield from (found.span() for found in _NUMBER.finditer(line, 0, HEAD))


def _tells_count(line: str) -> bool:
    """True if a word for tokens, a digit and a word for the rest stand close together, in this order."""
    counted = [found.end() for found in _COUNTED.finditer(line, 0, HEAD)]
    for left in _LEFT.finditer(line, 0, HEAD) if counted else ():
        start, end = max(left.start() - _TO_LEFT, 0), left.start()
        digits = [found.start() for found in _DIGIT.finditer(line, start, end)]
        at = bisect_left(counted, digits[0] - _TO_DIGIT) if digits else len(counted)
        if at < len(counted) and counted[at] <= digits[-1]:
            return True
    return False


class Paths:
    """Finds paths of people's files. Below one that was found, all are."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def __call__(self, line: str) -> Iterator[tuple[int, int]]:
        """Where the paths in a line begin and end."""
        if "/" in line:
            for pattern in (_PATH, _FILE_URL) if "file://" in line[:LINE] else (_PATH,):
                for found in pattern.finditer(line, 0, LINE):
                    path = found[0].rstrip(_SENTENCE_ENDS)
                    if found.end() < _MOST_END and self._is_own(path, line, found.start()):
                        self._known.add(path)
                        yield found.start(), found.start() + len(path)
        if ":\\" in line or ":/" in line:
            for found in _WINDOWS_PATH.finditer(line, 0, LINE):
                if found.end() < _MOST_END:
                    yield found.start(), found.start() + len(found[0].rstrip(_SENTENCE_ENDS))

    def _is_own(self, path: str, line: str, start: int) -> bool:
        if path.startswith(_EXAMPLE):
            return False
        if _ROOT.match(path) or path in self._known:
            return True
        if _PLACE.search(line, max(start - _BEFORE, 0), start) is not None:
            return True
        above = path
        for _ in range(_MOST_LEVELS):
            above = above.rpartition("/")[0]
            if above in self._known:
                return True
        return False


DATES: Kinds = {"date": [_by(*_DATES, needs=_YEAR, behind=_DAY_BEHIND)]}
IDS: Kinds = {"id": [_by(*_IDS, needs=_LONG)]}
VOLATILE: Kinds = {
    "time": [_by(ISO_TIME, WORDY_TIME, _CLOCK, needs=_MINUTES), _rest(_TIME_LINE, if_it=_TELLS_TIME)],
    "count": [_counts],
    "git": [_rest(_GIT_LINE)],
}
