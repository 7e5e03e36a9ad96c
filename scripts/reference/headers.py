"""The page of all headers."""

from __future__ import annotations

from engine_adapter import PRIVATE_HEADERS
from engine_adapter.http.prepare import ENDS_HERE
from proxy.headers import ANSWER_HEADERS, DROPPED_HEADERS, OWN_PREFIX, REQUEST_HEADERS
from scripts.reference.markdown import codes, page, table


def headers_page() -> str:
    """Every header that kvpin reads, sets or drops."""
    return page(
        """
        # Headers

        `scripts/docs` writes this page from `proxy/headers.py`.

        ## Of answers
        """,
        table(
            ("header", "on", "meaning", "example"),
            ((codes(each.names), each.on, each.meaning, f"`{each.example}`") for each in ANSWER_HEADERS),
        ),
        f"""
        All other headers of an engine's answer are passed on, except {codes(sorted(DROPPED_HEADERS))}
        and `{OWN_PREFIX}*`. Of an engine's error only those of the table are.

        ## Of requests

        kvpin reads these and passes them on, except where the table says otherwise.
        """,
        table(("header", "meaning"), ((codes(each.names), each.meaning) for each in REQUEST_HEADERS)),
        f"""
        These are never passed on: `{OWN_PREFIX}*`, {codes(sorted(ENDS_HERE))}.
        With several tenants, neither are
        {codes(sorted(name.decode() for name in PRIVATE_HEADERS))}.
        """,
    )
