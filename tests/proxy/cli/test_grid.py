import pytest
from rich.console import Console

from proxy.cli.grid import TerminalTable

ID = "req-0123456789abcdef0123456789abcdef"


def printed(grid, capsys, width):
    grid.print(Console(highlight=False, width=width))
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def requests():
    grid = TerminalTable(("request", "engine", "status", "tokens", "took"), less=("tokens", "took"))
    grid.add(ID, "tensorrt_llm-12", "200", "4000", "1500.0 ms")
    return grid


def test_everything_is_shown_where_there_is_room(capsys):
    assert printed(requests(), capsys, 100) == [
        "request                               engine           status  tokens  took",
        f"{ID}  tensorrt_llm-12  200     4000    1500.0 ms",
    ]


@pytest.mark.parametrize("width", [20, 40])
def test_an_id_is_whole_on_any_terminal(capsys, width):
    lines = printed(requests(), capsys, width)
    assert lines[1] == f"{ID}  tensorrt_llm-12  200"


def test_a_name_is_no_command_to_the_terminal(capsys):
    grid = TerminalTable(("model",), title="\x1b[2Jm")
    grid.add("\x1b]0;title\x07x\x9b2J\nsecond line")
    out = "\n".join(printed(grid, capsys, 40))
    assert not any(mark in out for mark in "\x1b\x07\x9b")
    assert "\nsecond line" in out
