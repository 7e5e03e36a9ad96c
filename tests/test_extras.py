"""What runs without the packages of the extras, which users of other parts do not install."""

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
