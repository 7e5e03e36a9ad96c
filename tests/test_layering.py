"""Checks what an import loads, and that each source file has its test file. The linter checks layers."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Source files without a test file of their own, and where they are tested.
ELSEWHERE = {
    "engine_adapter/errors.py": "classes of data: tests/proxy/api/test_error_answers.py",
    "engine_adapter/hold.py": "classes of data and a Protocol: tests of every adapter",
    **{
        f"engine_adapter/{kind}/routes.py": "a table: tests/engine_adapter/test_routes.py"
        for kind in ("llama_server", "sglang", "tensorrt_llm", "torch_engine", "vllm")
    },
    "engine_adapter/torch_engine/__main__.py": "one line: managed engines are started by it",
    "engine_adapter/transfer.py": "data and a Protocol: tests/engine_adapter/vllm/test_nixl.py",
    "proxy/cli/replay.py": "one call: tests/proxy/cli/test_replay_options.py runs it",
    "proxy/cli/__main__.py": "one line: tests/live and benchmarks start kvpin by it",
    "proxy/core/life/states.py": "classes of data: tests/proxy/core/life/test_machine.py",
    "proxy/fleet/discovery/found.py": "data and a Protocol: tests/proxy/fleet/discovery, tests/proxy/control",
    "proxy/peers/bus.py": "a Protocol: tests of the two that are one",
    "proxy/errors/codes.py": "a table: tests/proxy/api/test_error_answers.py",
    "proxy/headers.py": "a table: tests of those that read and set them",
    "proxy/errors/exceptions.py": "classes of data: tests/proxy/api/test_error_answers.py",
    "proxy/steps/legs.py": "what two steps share: tests/live/test_pairs.py, test_halves.py",
    "proxy/request/translate/translations.py": "a table: tests/proxy/request/translate/test_messages_api.py",
    "proxy/request/translate/translation.py": "a Protocol: tests/proxy/request/translate/test_translated.py",
}
SOURCES = sorted(
    path.relative_to(ROOT).as_posix()
    for package in ("proxy", "engine_adapter")
    for path in (ROOT / package).rglob("*.py")
    if path.name != "__init__.py"
)


@pytest.mark.parametrize("module", ["proxy", "proxy.server.run", "proxy.cli", "engine_adapter"])
def test_importing_loads_neither_torch_nor_transformers(module):
    code = f"import sys, {module}; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_file_has_its_test_file(source):
    folder, _, name = source.rpartition("/")
    assert (ROOT / "tests" / folder / f"test_{name}").exists() is (source not in ELSEWHERE)


def test_no_exception_for_a_file_that_is_gone():
    assert set(ELSEWHERE) <= set(SOURCES)


@pytest.mark.parametrize(
    "source", [path for path in SOURCES if path.count("/") > 1 and path not in ELSEWHERE]
)
def test_every_file_of_a_package_is_on_the_map_in_its_docstring(source):
    folder, _, name = source.rpartition("/")
    text = (ROOT / folder / "__init__.py").read_text(encoding="utf-8")
    assert name in (ast.get_docstring(ast.parse(text)) or "")
