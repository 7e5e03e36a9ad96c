import re
from io import StringIO

import pytest
from rich.console import Console

from proxy.cli.replay_run import table_of
from proxy.replay.report import COLUMNS


def rows_of(sizes):
    figures = {key: 1.5 for key, _, _ in COLUMNS}
    spread = {"seed": 0, "policy": "kvpin", **figures}
    return [{**spread, "engines": n, "gpu_tokens": size} for n in (1, 2) for size in sizes]


def printed(each, width):
    console = Console(width=width, file=StringIO(), highlight=False)
    table_of(each).print(console)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize(("width", "hidden"), [(140, ()), (88, ("busiest",)), (40, ("busiest", "p50"))])
def test_a_narrow_terminal_shows_fewer_columns_and_says_so(width, hidden):
    lines = printed(rows_of([500]), width)
    always = ["engines", "policy", "hit %", "mean TTFT s"]
    assert re.findall("|".join(always), lines[1]) == always
    assert not any(name in lines[1] for name in hidden)
    said = " ".join(lines).partition("no room for: ")[2]
    assert bool(said) is bool(hidden)
    assert all(name in said for name in hidden)
