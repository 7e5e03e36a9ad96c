"""The program of the quick start, and the settings that its commands write."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[3] / "docs" / "start.md").read_text(encoding="utf-8")


@pytest.mark.live
def test_the_program_prints_what_was_cached(live_proxy, capsys):
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    exec(compile(program.replace("http://127.0.0.1:8000", live_proxy), "start.md", "exec"), {})  # noqa: S102
    first, second = capsys.readouterr().out.splitlines()
    cached, tokens = map(int, re.fullmatch(r"(\d+) of (\d+) cached", second).groups())
    assert int(first.split()[0]) < cached < tokens
