"""Writes the pages of docs/reference/ from the code. scripts/reference/ has a file for each page.

.venv/bin/python scripts/make_reference.py
"""

from __future__ import annotations

from pathlib import Path

from scripts.reference.admin_api import admin_api_page
from scripts.reference.causes import causes_page
from scripts.reference.commands import cli_page
from scripts.reference.errors import errors_page
from scripts.reference.fates import fates_page
from scripts.reference.gate import gate_page
from scripts.reference.headers import headers_page
from scripts.reference.metrics import metrics_page
from scripts.reference.settings import settings_page

REFERENCE = Path(__file__).parent.parent / "docs" / "reference"
PAGES = {
    "cli.md": cli_page,
    "admin-api.md": admin_api_page,
    "settings.md": settings_page,
    "metrics.md": metrics_page,
    "errors.md": errors_page,
    "headers.md": headers_page,
    "causes.md": causes_page,
    "fates.md": fates_page,
    "gate.md": gate_page,
}


def main() -> None:
    """Writes all pages."""
    REFERENCE.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (REFERENCE / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
