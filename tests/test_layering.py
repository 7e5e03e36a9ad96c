"""Checks what an import loads, and how many lines each room has. The linter checks layers."""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Lines of a room's Python, by the beginning of its paths: the longest that fits counts. A room only shrinks,
# or grows in a commit that raises its budget and says why.
BUDGETS = dict(reversed(line.split()) for line in (ROOT / "tests/budgets.txt").read_text().splitlines())
# So much may a room be below its budget: then the budget has to fall, too.
SLACK = 150


# What the extras of pyproject.toml bring, but for `engine`: users of other parts do not install it.
EXTRAS = ("dns", "matplotlib", "openai", "opentelemetry", "redis")
LARGE = {"torch", "transformers", "uvicorn"}
OF_SERVERS = {"numpy", "starlette", "httptools", "pydantic", "httpx", "rich"}


@pytest.mark.parametrize(
    ("module", "unloaded"),
    [
        ("proxy.cli", LARGE | OF_SERVERS),
        ("engine_adapter", LARGE),
        ("proxy.server.run", LARGE),
        ("proxy.server.workers.supervisor", set()),
        ("proxy.cli.replay_run", set()),
    ],
)
def test_an_import_needs_no_package_of_extras_and_loads_none_that_is_large(module, unloaded):
    code = f"import sys; sys.modules.update(dict.fromkeys({EXTRAS})); import {module}"
    code += f"; print(sorted({unloaded} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def lines_by_room():
    lines = dict.fromkeys(BUDGETS, 0)
    for package in ("proxy", "engine_adapter"):
        for path in (ROOT / package).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            room = max((each for each in BUDGETS if name.startswith(each)), key=len)
            lines[room] += len(path.read_text(encoding="utf-8").splitlines())
    return lines


@pytest.mark.parametrize(("room", "lines"), lines_by_room().items())
def test_a_room_keeps_to_its_budget_of_lines(room, lines):
    mend = "say why in the commit, and change the room's number in tests/budgets.txt, in steps of 50"
    assert int(BUDGETS[room]) - SLACK <= lines <= int(BUDGETS[room]), mend


def test_no_module_binds_a_constant_twice():
    """The functions above the second one would read its value."""
    twice = []
    for package in ("proxy", "engine_adapter"):
        for path in (ROOT / package).rglob("*.py"):
            body = ast.parse(path.read_text(encoding="utf-8")).body
            bound = [each for each in body if isinstance(each, ast.Assign | ast.AnnAssign)]
            names = [name for each in bound for name in ast.walk(each) if isinstance(name, ast.Name)]
            count = Counter(name.id for name in names if isinstance(name.ctx, ast.Store))
            twice += [f"{path.name}: {name}" for name in count if name.isupper() and count[name] > 1]
    assert not twice
