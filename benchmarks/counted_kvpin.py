"""kvpin with a counter of the calls of Python functions on its event loop; `call_count.py` runs it.

    python counted_kvpin.py FILE serve …

SIGUSR1 begins a count and makes the empty FILE. The next one ends it and writes the `Count` to FILE.
When a coroutine resumes after an await, it counts as called again, and so do the coroutines that wait for it:
the interpreter enters their frames again.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from types import CodeType, FrameType

import msgspec

PACKAGE = 3  # parts of a path that name a file well enough
_GENERATED = "<string>"


class Calls(msgspec.Struct):
    """Calls of one function.

    Attributes:
        name: its qualified name and file.
        own: how often it was called.
        below: calls that were made within its calls, by whatever it called, its own included.
    """

    name: str
    own: int = 0
    below: int = 0


class Count(msgspec.Struct):
    """All calls of a time of `seconds`."""

    seconds: float
    functions: list[Calls]


class Counter:
    """Counts the calls of the thread that begins it."""

    def __init__(self) -> None:
        self._found: dict[CodeType, Calls] = {}
        self._running: list[tuple[Calls, int]] = []  # functions, and all calls before each
        self._calls = 0
        self._began = 0.0

    def begin(self) -> None:
        """Counts from now on."""
        self._began = time.monotonic()
        sys.setprofile(self.note)

    def end(self) -> Count:
        """Counts no more."""
        sys.setprofile(None)
        return Count(time.monotonic() - self._began, [*self._found.values()])

    def note(self, frame: FrameType, event: str, _argument: object) -> None:
        """See sys.setprofile."""
        if event == "call":
            code = frame.f_code
            function = self._found.get(code)
            if function is None:
                function = self._found[code] = Calls(_name(frame))
            function.own += 1
            self._running.append((function, self._calls))
            self._calls += 1
        elif event == "return" and self._running:  # some had begun before the count
            function, before = self._running.pop()
            function.below += self._calls - before


def _name(frame: FrameType) -> str:
    code = frame.f_code
    if code.co_filename == _GENERATED:  # of a dataclass
        return f"{type(next(iter(frame.f_locals.values()), None)).__name__}.{code.co_name} (generated)"
    return f"{code.co_qualname} ({'/'.join(Path(code.co_filename).parts[-PACKAGE:])})"


def main() -> None:
    """Runs kvpin."""
    file = Path(sys.argv.pop(1))
    counter: Counter | None = None

    def turn(_signal: int, _frame: FrameType | None) -> None:
        nonlocal counter
        if counter is None:
            counter = Counter()
            file.touch()
            counter.begin()
        else:
            part = file.with_suffix(".part")
            part.write_bytes(msgspec.json.encode(counter.end()))
            part.rename(file)
            counter = None

    signal.signal(signal.SIGUSR1, turn)
    from proxy.cli import main as kvpin  # noqa: PLC0415 - only where it is run

    kvpin()


if __name__ == "__main__":
    main()
