"""The page of what becomes of each part of a request in Anthropic's or OpenAI's API."""

from __future__ import annotations

from proxy.request.translate import fates
from scripts.reference.markdown import page, table

_TABLES = {
    "Tools of Anthropic's Messages": fates.MESSAGE_TOOLS,
    "Blocks of Anthropic's Messages": fates.MESSAGE_BLOCKS,
    "Fields of Anthropic's Messages": fates.MESSAGE_FIELDS,
    "Tools of OpenAI's Responses": fates.RESPONSE_TOOLS,
    "Items of OpenAI's Responses": fates.RESPONSE_ITEMS,
    "Fields of OpenAI's Responses": fates.RESPONSE_FIELDS,
}


def fates_page() -> str:
    """Every type and field: its fate, and what that means here."""
    return page(
        """
        # What becomes of tools, blocks, items and fields

        `scripts/docs` writes this page from `proxy/request/translate/fates.py`. It holds where kvpin serves
        [Messages](../api.md#anthropics-api) and [Responses](../api.md#openais-responses-api) as chats. Types
        are named without their version: `web_search` is also `web_search_20250305`.

        What is left out or turned into text is named in the header `x-kvpin-changed` (`tool:web_search`) and
        in `changed` of `kvpin requests --json`. Tools of an unknown type are left out, blocks and items of an
        unknown type are a 400, and unknown fields are kept.
        """,
        *(
            f"## {title}\n\n"
            + table(
                ("names", "fate", "here"),
                (
                    (", ".join(f"`{name}`" for name in rows if rows[name] == row), row.fate, row.here)
                    for row in dict.fromkeys(rows.values())
                ),
            )
            for title, rows in _TABLES.items()
        ),
    )
