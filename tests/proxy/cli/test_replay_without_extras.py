"""Only what draws needs the extra of replay."""

from __future__ import annotations

import subprocess
import sys

import pytest

WITHOUT = "import sys; sys.modules['matplotlib'] = None; "


@pytest.mark.parametrize(
    "code",
    ["import proxy.cli.replay_run", "from proxy.replay.report import curves", "import proxy.replay.report"],
)
def test_replay_needs_no_package_of_an_extra(code):
    """`kvpin replay FILE` and the page's Replay draw no PNG: only `--plot` needs `kvpin[replay]`."""
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT + code], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr.splitlines()[-1]
