"""Texts that tests compare whole. `RENEW=1` before pytest writes them anew."""

import os
from difflib import unified_diff
from pathlib import Path

import pytest


def check_golden(path: Path, cases: dict[str, str]) -> None:
    """Each case of the file, under its title, is what it is now."""
    text = "\n".join(f"# {title}\n{said}" for title, said in cases.items())
    if "RENEW" in os.environ:
        path.write_text(text, encoding="utf-8")
    known = path.read_text(encoding="utf-8")
    differs = [*unified_diff(known.splitlines(), text.splitlines(), path.name, "now", n=2, lineterm="")]
    if differs:
        pytest.fail("\n".join((*differs, "RENEW=1 writes it anew")), pytrace=False)
