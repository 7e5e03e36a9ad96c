import pytest
from rich.console import Console
from rich.text import Text

from proxy.cli.grid import TerminalTable, of_state

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


def test_columns_are_left_out_before_an_id_is_broken(capsys):
    lines = printed(requests(), capsys, 79)
    assert lines[1] == f"{ID}  tensorrt_llm-12  200     1500.0 ms"
    assert lines[2] == "no room for: tokens (--json shows everything)"
    assert max(map(len, lines)) <= 79


@pytest.mark.parametrize("width", [20, 40])
def test_an_id_is_whole_on_any_terminal(capsys, width):
    lines = printed(requests(), capsys, width)
    assert lines[1] == f"{ID}  tensorrt_llm-12  200"


def test_free_text_is_folded(capsys):
    grid = TerminalTable(("engine", "last error"), text="last error")
    grid.add("vllm-0", "GET /v1/models: all connection attempts failed")
    lines = printed(grid, capsys, 40)
    assert lines[1] == "vllm-0  GET /v1/models: all connection"
    assert " ".join(" ".join(lines[1:]).split()) == "vllm-0 GET /v1/models: all connection attempts failed"


def test_numbers_stand_to_the_right_and_nothing_is_markup(capsys):
    grid = TerminalTable(("engine", "cached"), numbers=("cached",), gap=1, title="[m]")
    grid.add("[e0]", "5")
    grid.add(Text("e1", "bold"), "1,000")
    assert printed(grid, capsys, 40) == ["[m]", "engine cached", "[e0]        5", "e1      1,000"]


def test_a_name_is_no_command_to_the_terminal(capsys):
    grid = TerminalTable(("model",), title="\x1b[2Jm")
    grid.add("\x1b]0;title\x07x\x9b2J\nsecond line")
    out = "\n".join(printed(grid, capsys, 40))
    assert not any(mark in out for mark in "\x1b\x07\x9b")
    assert "\nsecond line" in out


def test_cells_are_read_from_items(capsys):
    columns = {"id": "id", "tokens": "n", "state": lambda item: of_state(item["state"])}
    grid = TerminalTable.of(
        [{"id": "a", "n": 0, "state": "ready"}, {"id": "b", "n": None, "state": ""}], columns
    )
    assert printed(grid, capsys, 40)[1:] == ["a   0       ready", "b"]


def test_cells_of_states():
    assert (of_state("down").plain, of_state("down").style) == ("down", "red")
    assert of_state("ready", " (why)").plain == "ready (why)"
