"""A pytest plugin for llama.cpp's own server tests, and the comparison of two of their runs.

The plugin downloads no models. With LLAMA_CPP_PASSED, the report of a run before, it runs what passed there.
"""

from __future__ import annotations

import os
import sys
import xml.etree.ElementTree as ET
from typing import Any


def pytest_configure() -> None:
    """Starts no server just to download its model."""
    import utils  # noqa: PLC0415 - llama.cpp's own

    utils.ServerPreset.load_all = staticmethod(lambda: None)


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:  # noqa: ANN401 - not of this venv
    """Leaves out what did not pass before."""
    report = os.environ.get("LLAMA_CPP_PASSED")
    if report is None:
        return
    passed = read(report)
    left = [item for item in items if passed.get(f"{item.module.__name__}::{item.name}") != ""]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]


def read(report: str) -> dict[str, str]:
    """Each test of a report → why it did not pass; "" if it did."""
    results = {}
    for case in ET.parse(report).getroot().iter("testcase"):  # noqa: S314 - pytest wrote it
        why = [
            (child.get("message") or child.tag).splitlines()[0] for child in case if child.tag != "properties"
        ]
        name = f"{(case.get('classname') or '').rpartition('.')[2]}::{case.get('name')}"
        results[name] = (why or [""])[0]
    return results


def main(alone: str, kvpin: str) -> None:
    """Prints how many passed, and which of them kvpin lost."""
    before, after = read(alone), read(kvpin)
    passed = [name for name, why in before.items() if not why]
    lost = [name for name in passed if after.get(name) != ""]
    print(f"llama-server alone: {len(passed)} of {len(before)} pass")
    print(f"through kvpin:      {len(passed) - len(lost)} of these {len(passed)}")
    for name in lost:
        print(f"  lost: {name}: {after.get(name, 'not run')[:160]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
