"""What runs without the packages of the extras, which users of other parts do not install."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Import names of what the extras of pyproject.toml bring, but for `engine`.
PACKAGES = ("dns", "matplotlib", "openai", "opentelemetry", "redis")

WITHOUT = """
import sys
for name in sys.argv[2].split(","):
    sys.modules[name] = None  # importing it fails
__import__(sys.argv[1])
"""


@pytest.mark.parametrize(
    "module", ["proxy.cli", "proxy.cli.replay_run", "proxy.server.run", "proxy.server.workers.supervisor"]
)
def test_kvpin_starts_without_the_packages_of_extras(module):
    command = [sys.executable, "-c", WITHOUT, module, ",".join(PACKAGES)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_the_check_notices_a_package():
    command = [sys.executable, "-c", WITHOUT, "proxy.peers.redis_bus", ",".join(PACKAGES)]
    assert "redis" in subprocess.run(command, capture_output=True, text=True, check=False).stderr


def test_the_first_start_installs_nothing_that_the_installation_has_not():
    """`scripts/serve` after `scripts/install` installed a second time, for the examples."""
    installed, served = (
        re.search(pattern, (ROOT / "scripts" / name).read_text(), re.MULTILINE)[1].split(",")
        for name, pattern in (("install", r"^extras=\$\{1:-(.+)\}$"), ("serve", r"^extras=(.+)$"))
    )
    assert {*served} <= {*installed}
