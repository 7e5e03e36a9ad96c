"""Texts that tests compare whole. `RENEW=1` before pytest writes them anew."""

import os
from pathlib import Path


def check_golden(path: Path, cases: dict[str, str]) -> None:
    """Each case of the file, under its title, is what it is now."""
    text = "\n".join(f"# {title}\n{said}" for title, said in cases.items())
    if "RENEW" in os.environ:
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text, "RENEW=1 writes it anew"
