"""What becomes of each tool, block, item and field of Anthropic's and OpenAI's APIs in a chat.

Both translators read these tables, `docs/reference/fates.md` is made from them, and a test compares them with
the types that the packages `anthropic` and `openai` know. A type is named without its version (`_20250305`).

What a table leaves out or turns into text is told in the header `x-kvpin-changed` and in the record.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, NamedTuple


class Fate(StrEnum):
    """What becomes of a part of a request."""

    KEPT = "kept"
    MOVED = "moved"
    TEXT = "turned into text"
    LEFT_OUT = "left out"
    REFUSED = "refused"


class Row(NamedTuple):
    """One row: `here` says what that means here."""

    fate: Fate
    here: str


Rows = Mapping[str, Row]


def _rows(fate: Fate, here: str, *names: str) -> dict[str, Row]:
    return dict.fromkeys(names, Row(fate, here))


_NO_TOOL = "only the service knows its schema or runs it; a `tool_choice` that names it is a 400"
_NO_MEANING = "says nothing to an engine"

MESSAGE_TOOLS: Rows = {
    **_rows(Fate.KEPT, "a function", "custom"),
    **_rows(
        Fate.LEFT_OUT, _NO_TOOL, "advisor", "bash", "browser_toolset", "code_execution", "computer",
        "computer_toolset", "mcp_toolset", "memory", "text_editor", "tool_search_tool_bm25",
        "tool_search_tool_regex", "web_fetch", "web_search",
    ),
}  # fmt: skip
MESSAGE_BLOCKS: Rows = {
    **_rows(Fate.KEPT, "text of its message", "text", "search_result"),
    **_rows(
        Fate.KEPT, "an image of the user's message; of a tool's result, in the user's message after it",
        "image",
    ),
    **_rows(Fate.KEPT, "text documents as text; PDFs and files are refused", "document"),
    **_rows(Fate.MOVED, "`reasoning_content`", "thinking"),
    **_rows(Fate.MOVED, "`tool_calls`", "tool_use"),
    **_rows(Fate.MOVED, "a message of the role `tool`; an error begins with `Error: `", "tool_result"),
    **_rows(
        Fate.TEXT, "its texts, in its message; left out if it has none", "advisor_tool_result",
        "bash_code_execution_tool_result", "code_execution_tool_result", "compaction", "mcp_tool_result",
        "mcp_tool_use", "server_tool_use", "text_editor_code_execution_tool_result", "web_fetch_tool_result",
        "web_search_tool_result",
    ),
    **_rows(
        Fate.LEFT_OUT, "only the service can read it", "browser_state", "container_upload",
        "redacted_thinking",
    ),
    **_rows(
        Fate.LEFT_OUT, "all tools are in the prompt", "mcp_tool_listing", "tool_addition", "tool_reference",
        "tool_removal", "tool_search_tool_result",
    ),
    **_rows(Fate.LEFT_OUT, _NO_MEANING, "fallback"),
}  # fmt: skip
MESSAGE_FIELDS: Rows = {
    **_rows(
        Fate.KEPT, "the same", "model", "max_tokens", "messages", "stream", "temperature", "top_k", "top_p",
    ),
    **_rows(Fate.KEPT, "functions, and the choice among them", "tools", "tool_choice"),
    **_rows(Fate.MOVED, "how long the KV is kept: [retention](retention.md)", "cache_control"),
    **_rows(Fate.MOVED, "`user`, as it is, also where it is a JSON text with a session's id", "metadata"),
    **_rows(
        Fate.MOVED, "`response_format`; `effort` is `reasoning_effort` (`xhigh`, `max`: `high`)",
        "output_config",
    ),
    **_rows(Fate.MOVED, "`response_format`", "output_format"),
    **_rows(Fate.MOVED, "`stop`", "stop_sequences"),
    **_rows(Fate.MOVED, "the first message", "system"),
    **_rows(
        Fate.MOVED, "`enable_thinking` of the template; `adaptive` leaves it to the template, "
        "`budget_tokens` is not enforced", "thinking",
    ),
    **_rows(Fate.REFUSED, "needs Anthropic's own service", "container", "mcp_servers"),
    **_rows(
        Fate.LEFT_OUT, "the history is served as the client sends it", "compaction", "context_management",
        "thread",
    ),
    **_rows(
        Fate.LEFT_OUT, _NO_MEANING, "betas", "billing_policy", "diagnostics", "fallback_credit_token",
        "fallbacks",
        "inference_geo", "n", "service_tier", "speed", "user_profile_id", "workspace_id",
    ),
}  # fmt: skip

RESPONSE_TOOLS: Rows = {
    **_rows(Fate.KEPT, "a function", "function"),
    **_rows(
        Fate.MOVED, "a function with one argument, `input`; the answer's call is one of the custom tool "
        "again. Its description tells the grammar, which is not enforced", "custom",
    ),
    **_rows(
        Fate.MOVED, "a function for each of its tools, `<namespace>__<name>`; the answer's call has "
        "namespace and name again", "namespace",
    ),
    **_rows(
        Fate.LEFT_OUT, _NO_TOOL, "apply_patch", "code_interpreter", "computer", "computer_use_preview",
        "file_search", "image_generation", "local_shell", "mcp", "programmatic_tool_calling", "shell",
        "tool_search", "web_search", "web_search_preview",
    ),
}  # fmt: skip
RESPONSE_ITEMS: Rows = {
    **_rows(Fate.KEPT, "a message", "message"),
    **_rows(Fate.KEPT, "the item that it names", "item_reference"),
    **_rows(
        Fate.MOVED, "`reasoning_content`; of an item without a text, that of the kept item with its id. "
        "`encrypted_content` of another server is left out", "reasoning",
    ),
    **_rows(Fate.MOVED, "`tool_calls` of the assistant's message", "function_call", "custom_tool_call"),
    **_rows(
        Fate.MOVED, "a message of the role `tool`; images in the user's message after it",
        "function_call_output",
        "custom_tool_call_output",
    ),
    **_rows(
        Fate.TEXT, "its texts, in the assistant's message; left out if it has none", "apply_patch_call",
        "apply_patch_call_output", "code_interpreter_call", "computer_call", "computer_call_output",
        "file_search_call", "local_shell_call", "local_shell_call_output", "mcp_call", "program",
        "program_output",
        "shell_call", "shell_call_output", "web_search_call",
    ),
    **_rows(Fate.MOVED, "a message of the user; parts that are no text are left out", "agent_message"),
    **_rows(
        Fate.LEFT_OUT, "only the service can read it", "compaction", "context_compaction",
        "image_generation_call",
    ),
    **_rows(
        Fate.LEFT_OUT, "only tools of `tools` are offered", "additional_tools", "mcp_approval_request",
        "mcp_approval_response", "mcp_list_tools", "tool_search_call", "tool_search_output",
    ),
    **_rows(Fate.LEFT_OUT, _NO_MEANING, "compaction_trigger", "configuration_update"),
}  # fmt: skip
RESPONSE_FIELDS: Rows = {
    **_rows(
        Fate.KEPT, "the same", "model", "parallel_tool_calls", "prompt_cache_retention", "safety_identifier",
        "stream", "temperature", "top_p", "user",
    ),
    **_rows(Fate.KEPT, "names the conversation: its requests go where their KV is", "prompt_cache_key"),
    **_rows(Fate.KEPT, "how long the KV is kept: [retention](retention.md)", "prompt_cache_options"),
    **_rows(Fate.MOVED, "messages", "input", "instructions"),
    **_rows(
        Fate.MOVED, "the messages of that response; after `store: false` it is not kept, and naming it is "
        "a 404",
        "previous_response_id",
    ),
    **_rows(Fate.MOVED, "kvpin keeps the response, unless it is false", "store"),
    **_rows(Fate.MOVED, "`max_tokens`", "max_output_tokens"),
    **_rows(Fate.MOVED, "`response_format`", "text"),
    **_rows(Fate.MOVED, "`effort` is `reasoning_effort`", "reasoning"),
    **_rows(
        Fate.MOVED, "`reasoning.encrypted_content` gives the reasoning as base64, logprobs are `logprobs`; "
        "others are left out", "include",
    ),
    **_rows(Fate.MOVED, "`logprobs`", "top_logprobs"),
    **_rows(Fate.MOVED, "functions, and the choice among them", "tools", "tool_choice"),
    **_rows(Fate.MOVED, "the answer repeats it", "metadata"),
    **_rows(
        Fate.REFUSED, "responses are not made in the background: leave out `background`, and stream",
        "background",
    ),
    **_rows(Fate.REFUSED, "there is no Conversations API here: use previous_response_id", "conversation"),
    **_rows(Fate.REFUSED, "there are no prompt templates here: send the prompt itself", "prompt"),
    **_rows(Fate.REFUSED, "nothing is moderated here", "moderation"),
    **_rows(Fate.LEFT_OUT, "a prompt beyond the context is a 400", "context_management", "truncation"),
    **_rows(
        Fate.LEFT_OUT, _NO_MEANING, "access_programs", "background_options", "client_metadata", "image",
        "max_tool_calls", "messages", "n", "service_tier", "stream_options",
    ),
}  # fmt: skip


class Stop(NamedTuple):
    """Why an answer ended: Anthropic's `stop_reason`, and the reason of a response that is incomplete."""

    of_message: str
    of_response: str | None = None


STOPS: Mapping[str, Stop] = {
    "stop": Stop("end_turn"),
    "length": Stop("max_tokens", "max_output_tokens"),
    "tool_calls": Stop("tool_use"),
    "content_filter": Stop("refusal", "content_filter"),
}
"""A chat's `finish_reason` → what it is in the other APIs."""

UNKNOWN = Row(Fate.LEFT_OUT, "")
"""The row of any other kind."""
TOLD = frozenset({Fate.TEXT, Fate.LEFT_OUT})
"""Fates that the client is told of."""
_VERSION = re.compile(r"_\d{8}|_\d{4}_\d\d_\d\d")
_NAME = re.compile(r"\w{1,48}", re.ASCII)
_MOST_TOLD = 16
# Where items and blocks of a service have texts. `encrypted_content`, ids and the
# data of images are no texts.
_TEXTS = frozenset(
    ("action", "arguments", "code", "command", "commands", "content", "diff", "error", "error_code", "input",
     "logs", "name", "operation", "outcome", "output", "outputs", "path", "queries", "query", "result",
     "results", "source", "stderr", "stdout", "text", "title", "url")
)  # fmt: skip
_DEEPEST = 8


def plain(kind: str) -> str:
    """A type without its version."""
    return _VERSION.sub("", kind)


def told(*parts: tuple[str, Rows, Iterable[str]]) -> tuple[str, ...]:
    """The kinds that are left out or turned into text, as the client is told of them: `tool:web_search`. At
    most 16 names, then `more`. Each part: what the kinds are, their rows, and the kinds of a request."""
    names: dict[str, None] = {}
    for what, rows, kinds in parts:
        for kind in dict.fromkeys(map(plain, kinds)):
            if rows.get(kind, UNKNOWN).fate in TOLD:
                names[f"{what}:{kind if _NAME.fullmatch(kind) else 'other'}"] = None
    every = tuple(names)
    return every if len(every) <= _MOST_TOLD else (*every[:_MOST_TOLD], "more")


def text_of(value: Any, depth: int = 0) -> str:  # noqa: ANN401 - JSON
    """The texts of an item or block of a service, in its own order, one a line."""
    if isinstance(value, str):
        return value
    if depth > _DEEPEST:
        return ""
    if isinstance(value, list):
        return "\n".join(filter(None, (text_of(each, depth + 1) for each in value)))
    if not isinstance(value, dict):
        return ""
    read = _TEXTS | {"data"} if value.get("type") == "text" else _TEXTS
    inner = (text_of(each, depth + 1) for name, each in value.items() if name in read)
    return "\n".join(filter(None, inner))
