"""Extra ids of a prompt given as token ids or text."""

from __future__ import annotations

from engine_adapter.prompt.extra_ids import resolve_extra_ids
from engine_adapter.types import ExtraIds, TokenIds
from proxy.errors import BadRequest
from proxy.prompt.render import CompletionInput
from proxy.prompt.tables import PromptTables


def extra_ids_of(
    token_ids: TokenIds[int], source: CompletionInput, *, vocab_size: int, tables: PromptTables
) -> ExtraIds[int] | None:
    """One extra id per token, None when all of it is text.

    Raises:
        BadRequest: the request names a table that is not registered.
        PromptTableError: naming the index of the first id that breaks a rule.
    """
    table = None
    if source.table is not None:
        table = tables.ref(source.table)
        if table is None:
            raise BadRequest(f"there is no prompt table {source.table!r}", param="prompt_table")
    resolved = resolve_extra_ids(
        token_ids, vocab_size=vocab_size, explicit=source.explicit, table=table, registered=tables.refs
    )
    return resolved.extra_ids
