"""A table on the terminal that never breaks an id or a number over two lines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.console import Console
from rich.padding import PaddingDimensions
from rich.table import Table
from rich.text import Text

# The least width of a column of free text, which is folded.
_TEXT_WIDTH = 24
# Width of output that is no terminal, such as a file.
_FILE_WIDTH = 160
_STATE_STYLES = {"ready": "green", "done": "green", "precise": "green", "failed": "red", "down": "red"}
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")


def console() -> Console:
    """Standard output."""
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=_FILE_WIDTH)


@dataclass(slots=True)
class Grid:
    """Rows under titles.

    Attributes:
        columns: their titles.
        text: the column of free text: folded where the rest leaves too little room.
        less: columns that are left out, in this order, until the others fit.
        numbers: columns that are aligned to the right.
        gap: spaces between columns.
        title: a line above.
        rows: the cells, as `add` takes them.
    """

    columns: Sequence[str]
    text: str = ""
    less: Sequence[str] = ()
    numbers: Sequence[str] = ()
    gap: int = 2
    title: str | None = None
    rows: list[tuple[str | Text, ...]] = field(default_factory=list)

    def add(self, *cells: str | Text) -> None:
        """Adds a row. Plain text is never read as markup, nor as commands to the terminal: engines choose
        names and errors."""
        self.rows.append(tuple(_shown(cell) if isinstance(cell, str) else cell for cell in cells))

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
            out.print(f"no room for: {', '.join(hidden)} (--json shows everything)", style="dim")

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
            for title, width in zip(
                self.columns, map(_widest, zip(self.columns, *self.rows, strict=True)), strict=True
            )
            if title not in hidden
        ]
        return sum(widths) + self.gap * (len(widths) - 1)

    def _table(self, hidden: Sequence[str]) -> Table:
        padding: PaddingDimensions = (0, self.gap, 0, 0)
        table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left", padding=padding)
        table.title = Text(_shown(self.title)) if self.title is not None else None
        shown = [at for at, title in enumerate(self.columns) if title not in hidden]
        for at in shown:
            title = self.columns[at]
            table.add_column(
                title,
                overflow="fold",
                no_wrap=title != self.text,
                justify="right" if title in self.numbers else "left",
            )
        for row in self.rows:
            cells = (row[at] for at in shown)
            table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))
        return table


def of_state(state: str, more: str = "") -> Text:
    """The cell of a state, in its colour, and plain text behind it."""
    return Text(state, _STATE_STYLES.get(state, "")).append(more, "default")


def of_count(value: int | None) -> str:
    """The cell of a number; empty where it is not known."""
    return "" if value is None else str(value)


def _shown(text: str) -> str:
    """The text with a mark in place of each control character."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def _widest(cells: Iterable[str | Text]) -> int:
    return max(cell.cell_len if isinstance(cell, Text) else cell_len(cell) for cell in cells)
