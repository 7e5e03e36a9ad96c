"""A table on the terminal that never breaks an id or a number over two lines."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.progress import Progress, ProgressColumn
from rich.table import Table
from rich.text import Text

# The least width of a column of free text, which is folded.
_TEXT_WIDTH = 24
# Width of output that is no terminal, such as a file.
_FILE_WIDTH = 160
_STATE_STYLES = {"ready": "green", "done": "green", "precise": "green", "failed": "red", "down": "red"}
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")


# Title → a key of each item, or what makes the cell of it.
Columns = Mapping[str, str | Callable[[Any], object]]


def console(file_width: int = _FILE_WIDTH) -> Console:
    """Standard output. `file_width`: characters of a line where that is no terminal."""
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=file_width)


def bars(*columns: ProgressColumn) -> Progress:
    """Progress bars on standard error; none where that is no terminal."""
    err = Console(stderr=True)
    return Progress(*columns, console=err, transient=True, disable=not err.is_terminal)


@dataclass(slots=True)
class TerminalTable:
    """Rows under titles.

    Attributes:
        text: the column of free text: folded where the rest leaves too little room.
        less: columns that are left out, in this order, until the others fit.
        numbers: columns that are aligned to the right.
        gap: spaces between columns.
        title: a line above.
        lined: lines between the columns, and below the last row of each section.
        whole: the option that shows every column.
    """

    columns: Sequence[str]
    text: str = ""
    less: Sequence[str] = ()
    numbers: Sequence[str] = ()
    gap: int = 2
    title: str | None = None
    lined: bool = False
    whole: str = "--json"
    _rows: list[tuple[Text, ...]] = field(default_factory=list)
    _ends: set[int] = field(default_factory=set)

    @classmethod
    def of(
        cls,
        items: Iterable[Any],
        columns: Columns,
        **layout: Any,  # noqa: ANN401 - as above
    ) -> Self:
        """A row for each item. A cell is the item's value of that name, or what the function says of it."""
        grid = cls(tuple(columns), **layout)
        for item in items:
            grid.add(*(item[how] if isinstance(how, str) else how(item) for how in columns.values()))
        return grid

    def add(self, *cells: object) -> None:
        """Adds a row; None is an empty cell. Plain text is never read as markup, nor as commands to the
        terminal: engines choose names and errors."""
        self._rows.append(tuple(each if isinstance(each, Text) else Text(_shown(each)) for each in cells))

    def end_section(self) -> None:
        """Draws a line below the last row."""
        self._ends.add(len(self._rows) - 1)

    def fitted(self, width: int) -> Table:
        """The table with the columns that fit."""
        return self._table(self._hidden(width))

    def print(self, out: Console, *, header: bool = True) -> None:
        """Prints the rows. Where even the columns that stay are too wide, lines run over the edge."""
        hidden = self._hidden(out.width)
        table = self._table(hidden)
        table.show_header = header
        terminal, out.width = out.width, max(out.width, self._width(hidden))
        out.print(table, crop=False)
        out.width = terminal
        if hidden:
            out.print(f"no room for: {', '.join(hidden)} ({self.whole} shows everything)", style="dim")

    def _hidden(self, width: int) -> list[str]:
        """The columns that find no room."""
        hidden: list[str] = []
        while self._width(hidden) > width and len(hidden) < len(self.less):
            hidden.append(self.less[len(hidden)])
        return hidden

    def _width(self, hidden: Sequence[str]) -> int:
        """Width that the columns need, without the hidden ones."""
        widths = [
            min(width, _TEXT_WIDTH) if title == self.text else width
            for at, title in enumerate(self.columns)
            if title not in hidden
            for width in [max(cell_len(title), *(row[at].cell_len for row in self._rows), 0)]
        ]
        if self.lined:
            return sum(widths) + 3 * len(widths) + 1
        return sum(widths) + self.gap * (len(widths) - 1)

    def _table(self, hidden: Sequence[str]) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, self.gap, 0, 0)) if not self.lined else Table()
        table.header_style, table.title_justify = "bold", "left"
        table.title = Text(_shown(self.title)) if self.title is not None else None
        shown = [at for at, title in enumerate(self.columns) if title not in hidden]
        for at in shown:
            title = self.columns[at]
            justify: JustifyMethod = "right" if title in self.numbers else "left"
            table.add_column(title, overflow="fold", no_wrap=title != self.text, justify=justify)
        for number, row in enumerate(self._rows):
            table.add_row(*(row[at] for at in shown), end_section=number in self._ends)
        return table


def of_state(state: str, more: str = "") -> Text:
    """The cell of a state, in its colour, and plain text behind it."""
    return Text(state, _STATE_STYLES.get(state, "")).append(more, "default")


def _shown(value: object) -> str:
    """A value as text, with a mark in place of each control character."""
    return "" if value is None else _CONTROL.sub("\N{REPLACEMENT CHARACTER}", str(value))
