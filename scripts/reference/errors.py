"""The page of all error codes."""

from __future__ import annotations

from engine_adapter.causes import Code
from scripts.reference.markdown import page, table


def errors_page() -> str:
    """Every error code: its status, what it means."""
    statuses = {code: str(code.status) for code in Code} | {Code.ENGINE_REJECTED: "the engine's"}
    return page(
        """
        # Error codes

        `scripts/docs` writes this page from `engine_adapter/causes.py`: the `error.code` of kvpin's own
        errors. An error of an engine keeps its status, code and further fields; some engines give a number or
        null as code. The [embedded engine](../engines/embedded.md) uses these codes, and a few of its own.

        A request that is no HTTP/1.1 gets a 400, one with a head of more than 64 KiB a 431, both in plain
        text. Errors under `/v1/messages` have [Anthropic's shape](../api.md#anthropics-api), which has
        no code.
        """,
        table(
            ("code", "status", "meaning"),
            ((f"`{code}`", status, code.meaning) for code, status in statuses.items()),
        ),
    )
