"""Which clients are run, with which features, on which engines.

A cell of the table is a feature of a client. It is run on every engine that has the feature.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

ENGINES = {"embedded": "E", "llama-server": "L", "fake": "F"}
"""The engines, and their letters in the table."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A clear error that clients get where an engine lacks a feature.

    Attributes:
        status: the HTTP status.
        reason: why, as the documentation says it.
    """

    status: int
    reason: str


@dataclass(frozen=True, slots=True)
class Feature:
    """A line of the table.

    Attributes:
        title: what the table says.
        engines: where it is run.
        refused: engine → the error that the client must get.
    """

    title: str
    engines: tuple[str, ...] = tuple(ENGINES)
    refused: dict[str, Refusal] = field(default_factory=dict)


FAKE = ("fake",)
_NO_IMAGES = Refusal(400, "its model in the tests takes text only")
FEATURES = {
    "models": Feature("list of models"),
    "chat": Feature("chat"),
    "stream": Feature("stream"),
    "usage": Feature("usage, in streams only if asked for"),
    "stop": Feature("stop sequences"),
    "parallel": Feature("8 requests at once"),
    "many": Feature("several answers (`n`)"),
    "logprobs": Feature("log probabilities"),
    "cached": Feature("cached tokens on the second turn"),
    "headers": Feature("response headers"),
    "tools": Feature("a tool call and its result", FAKE),
    "stream_tools": Feature("streamed tool calls", FAKE),
    "schema": Feature("structured output"),
    "reasoning": Feature("reasoning content", FAKE),
    "embeddings": Feature("embeddings"),
    "images": Feature("images", refused={"embedded": _NO_IMAGES, "llama-server": _NO_IMAGES}),
    "count_tokens": Feature(
        "count of tokens", refused={"fake": Refusal(501, "neither it nor kvpin knows its tokenizer")}
    ),
    "messages": Feature("Anthropic Messages"),
    "responses": Feature("Responses"),
    "responses_stream": Feature("Responses, streamed"),
    "responses_tools": Feature("Responses, tools", FAKE),
    "responses_kept": Feature("Responses, `previous_response_id`"),
    "agent": Feature("one-shot task", FAKE),
    "wrong_key": Feature("401"),
    "no_model": Feature("404", ("embedded", "fake")),  # a llama-server takes any name
    "bad_request": Feature("400"),
    "rate_limit": Feature("429 and `retry-after`", FAKE),
    "server_error": Feature("503 retried", FAKE),
    "no_retry": Feature("`x-should-retry: false`", FAKE),
    "cancel": Feature("client leaves in mid-stream", FAKE),
    "death": Feature("engine dies in mid-answer", FAKE),
    "timeout": Feature("timeout", FAKE),
}


@dataclass(frozen=True, slots=True)
class Client:
    """A column of the table.

    Attributes:
        pins: its environment: a file in `pins/` (Python) or a directory there (node).
        program: the file in `programs/`.
        features: what it can ask for.
        asynchronous: runs its asynchronous half.
        engines: where it is run.
        small: runs in every test run, on the embedded engine and the fake; `scripts/test-clients` runs all.
    """

    pins: str
    program: str
    features: tuple[str, ...]
    asynchronous: bool = False
    small: bool = False
    engines: tuple[str, ...] = tuple(ENGINES)


_OPENAI = (
    *("models", "chat", "stream", "usage", "stop", "parallel", "many", "logprobs", "cached", "headers"),
    *("tools", "stream_tools", "schema", "reasoning", "embeddings", "images"),
    *("responses", "responses_stream", "responses_tools", "responses_kept"),
    *("wrong_key", "no_model", "bad_request", "rate_limit", "server_error", "no_retry"),
    *("cancel", "death", "timeout"),
)

_ANTHROPIC = (
    *("chat", "stream", "usage", "stop", "parallel", "cached", "headers", "tools", "stream_tools"),
    *("reasoning", "images", "count_tokens", "wrong_key", "no_model", "bad_request", "rate_limit"),
    *("server_error", "no_retry", "cancel", "death", "timeout"),
)
_PLAIN = (
    *("chat", "stream", "parallel", "wrong_key", "no_model", "bad_request", "rate_limit", "server_error"),
    *("no_retry", "cancel", "death", "timeout"),
)
_TOOLS = ("tools", "stream_tools", "schema")


def _without(features: tuple[str, ...], *names: str) -> tuple[str, ...]:
    return tuple(feature for feature in features if feature not in names)


CLIENTS = {
    "openai-python 3": Client("openai-3", "openai_python.py", _OPENAI, small=True),
    "openai-python 3, async": Client("openai-3", "openai_python.py", _OPENAI, asynchronous=True),
    "openai-python 2": Client("openai-2", "openai_python.py", _OPENAI),
    "openai-python 2, async": Client("openai-2", "openai_python.py", _OPENAI, asynchronous=True),
    "openai-node 7": Client("node", "openai_node.mjs", _OPENAI),
    "openai-node 6": Client("openai-node-6", "openai_node.mjs", _OPENAI),
    "anthropic-python": Client("anthropic", "anthropic_python.py", _ANTHROPIC, small=True),
    "anthropic-python, async": Client("anthropic", "anthropic_python.py", _ANTHROPIC, asynchronous=True),
    "anthropic-node": Client("node", "anthropic_node.mjs", _ANTHROPIC),
    "LangChain": Client(
        "langchain",
        "use_langchain.py",
        (
            *(*_PLAIN, *_TOOLS, "usage", "stop", "many", "logprobs", "cached", "embeddings", "images"),
            *("responses", "responses_stream", "messages"),
        ),
    ),
    "LlamaIndex": Client(
        "llama-index",
        "use_llama_index.py",
        _without((*_PLAIN, *_TOOLS, "usage", "stop", "embeddings", "images"), "no_retry", "cancel"),
    ),
    "litellm": Client(
        "litellm",
        "use_litellm.py",
        (
            *(*_PLAIN, *_TOOLS, "usage", "stop", "many", "logprobs", "cached", "headers", "reasoning"),
            *("embeddings", "images", "responses", "messages"),
        ),
    ),
    "OpenAI Agents SDK": Client(
        "openai-agents",
        "use_openai_agents.py",
        (*_PLAIN, *_TOOLS, "usage", "responses", "responses_stream", "responses_tools"),
    ),
    "instructor": Client("instructor", "use_instructor.py", (*_TOOLS, "wrong_key", "messages")),
    "pydantic-ai": Client(
        "pydantic-ai",
        "use_pydantic_ai.py",
        (*_PLAIN, *_TOOLS, "usage", "cached", "images", "responses", "messages"),
    ),
    "AI SDK": Client(
        "node",
        "ai_sdk.mjs",
        (
            *(*_without(_PLAIN, "no_retry"), *_TOOLS, "usage", "stop", "headers", "reasoning", "embeddings"),
            *("images", "responses", "responses_stream", "messages"),
        ),
    ),
    # Noise is no edit and no command: only the script lets an agent finish its task.
    "aider": Client("aider", "use_aider.py", ("agent",), engines=FAKE),
    "Codex": Client("codex", "codex.mjs", ("agent",), engines=FAKE),
}

REQUIREMENTS = {
    "aider": ("aider-chat",),
    "anthropic": ("anthropic>=2,<3",),
    "codex": ("node@22", "@openai/codex@0"),
    "instructor": ("instructor", "anthropic"),
    "langchain": ("langchain", "langchain-openai", "langchain-anthropic"),
    "litellm": ("litellm", "mcp"),
    "node": (
        *("node@22", "openai@7", "@anthropic-ai/sdk@1"),
        *("ai@7", "@ai-sdk/openai@4", "@ai-sdk/openai-compatible@3", "@ai-sdk/anthropic@4"),
    ),
    "llama-index": ("llama-index-llms-openai-like", "llama-index-embeddings-openai-like"),
    "openai-2": ("openai>=2,<3",),
    "openai-3": ("openai>=3,<4",),
    "openai-agents": ("openai-agents",),
    "openai-node-6": ("node@22", "openai@6"),
    "pydantic-ai": ("pydantic-ai-slim[openai,anthropic]",),
}
"""What each environment is locked from."""


def cells(*, small: bool) -> Iterator[tuple[str, str, str]]:
    """Client, engine and feature of each cell, those of one process together."""
    for name, client in CLIENTS.items():
        for engine in client.engines:
            if not small or (client.small and engine != "llama-server"):
                yield from ((name, engine, feature) for feature in features_on(client, engine))


def features_on(client: Client, engine: str) -> list[str]:
    """The features of a client that are run on an engine."""
    return [feature for feature in client.features if engine in FEATURES[feature].engines]


def table(failed: Collection[tuple[str, str]] = ()) -> str:
    """The matrix as Markdown: clients by number, features by line, and what engines refuse.

    Args:
        failed: client and feature of cells that failed on an engine.
    """

    def cell(name: str, client: Client, feature: str) -> str:
        return "–" if feature not in client.features else "✗" if (name, feature) in failed else "✓"

    numbered = [f"{number}. {name}" for number, name in enumerate(CLIENTS, 1)]
    columns = [str(number) for number in range(1, len(CLIENTS) + 1)]
    rows = [["feature", "engines", *columns], ["---"] * (2 + len(columns))]
    refusals = []
    for name, feature in FEATURES.items():
        letters = "".join(
            letter if engine not in feature.refused else letter.lower()
            for engine, letter in ENGINES.items()
            if engine in feature.engines
        )
        cells_of = [cell(client, CLIENTS[client], name) for client in CLIENTS]
        rows.append([feature.title, letters, *cells_of])
        refusals += [
            f"- {feature.title}, {engine}: {refusal.status}, {refusal.reason}."
            for engine, refusal in feature.refused.items()
        ]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*numbered, "", *lines, "", "Refused:", "", *refusals, ""])
