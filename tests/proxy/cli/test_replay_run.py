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


def test_runs_of_several_sizes_have_a_column_of_sizes():
    lines = printed(rows_of([500, 5000]), 140)
    assert "GPU tokens" in lines[1]
    assert [line.split("│")[2].strip() for line in lines[3:-1] if "kvpin" in line] == ["500", "5,000"] * 2
    assert sum(line.startswith("├") for line in lines) == 3


def test_figures_say_how_far_runs_are_apart_and_that_there_is_none():
    each = rows_of([500])
    each += [{**row, "seed": 1, "hit_percent": 2.5, "p50_ttft_s": None} for row in each]
    line = printed(each, 140)[3]
    assert "2.0 ±0.5" in line
    assert line.count("–") == 1


@pytest.mark.parametrize(("width", "hidden"), [(140, ()), (88, ("busiest",)), (40, ("busiest", "p50"))])
def test_a_narrow_terminal_shows_fewer_columns_and_says_so(width, hidden):
    lines = printed(rows_of([500]), width)
    assert re.findall(r"engines|policy|hit %|mean TTFT s", lines[1]) == [
        "engines",
        "policy",
        "hit %",
        "mean TTFT s",
    ]
    assert not any(name in lines[1] for name in hidden)
    said = " ".join(lines).partition("no room for: ")[2]
    assert bool(said) is bool(hidden)
    assert all(name in said for name in hidden)
