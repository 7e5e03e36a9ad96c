"""Parts of a page, from texts of the code. Their links are relative to docs/."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from textwrap import dedent

_LINK = re.compile(r"\]\((?!http)")


def page(*parts: str) -> str:
    """A page of these parts."""
    return "\n\n".join(dedent(part).strip() for part in parts) + "\n"


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, of texts of the code."""
    lines = (titles, ["---"] * len(titles), *rows)
    return linked("\n".join(f"| {' | '.join(cells)} |" for cells in lines))


def linked(text: str) -> str:
    """A text of the code, with links as they are in docs/reference/."""
    return _LINK.sub("](../", text)


def codes(names: Iterable[str]) -> str:
    """Names as code."""
    return ", ".join(f"`{name}`" for name in names)
