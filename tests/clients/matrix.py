"""Which clients are run, with which features, on which engines.

A cell of the table is a feature of a client. Each is run on every engine that has the feature.
"""

from __future__ import annotations

from dataclasses import dataclass

ENGINES = ("embedded", "llama-server", "fake")


@dataclass(frozen=True, slots=True)
class Feature:
    """A line of the table.

    Attributes:
        title: what the table says.
        engines: where it is run.
        refused: engine → status and reason, where the client must get a clear error instead.
    """

    title: str
    engines: tuple[str, ...] = ENGINES
    refused: dict[str, tuple[int, str]] | None = None

    def refusal(self, engine: str) -> int | None:
        """The status that a client gets on this engine; None if it is served."""
        found = (self.refused or {}).get(engine)
        return found[0] if found else None


FAKE = ("fake",)
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
    "tools": Feature("a tool call and its result"),
    "stream_tools": Feature("streamed tool calls"),
    "schema": Feature("structured output"),
    "reasoning": Feature("reasoning content", FAKE),
    "embeddings": Feature("embeddings"),
    "images": Feature("images"),
    "count_tokens": Feature("count of tokens"),
    "messages": Feature("Anthropic Messages"),
    "responses": Feature("Responses"),
    "responses_stream": Feature("Responses, streamed"),
    "responses_tools": Feature("Responses, tools"),
    "responses_kept": Feature("Responses, `previous_response_id`"),
    "agent": Feature("one-shot task"),
    "wrong_key": Feature("401"),
    "no_model": Feature("404"),
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
        small: is part of every test run; all others are run by `scripts/test-clients`.
    """

    pins: str
    program: str
    features: tuple[str, ...]
    asynchronous: bool = False
    small: bool = False


_OPENAI = (
    *("models", "chat", "stream", "usage", "stop", "parallel", "many", "logprobs", "cached", "headers"),
    *("tools", "stream_tools", "schema", "reasoning", "embeddings", "images"),
    *("responses", "responses_stream", "responses_tools", "responses_kept"),
    *("wrong_key", "no_model", "bad_request", "rate_limit", "server_error", "no_retry"),
    *("cancel", "death", "timeout"),
)

CLIENTS = {
    "openai-python 3": Client("openai-3", "openai_python.py", _OPENAI, small=True),
    "openai-python 3, async": Client("openai-3", "openai_python.py", _OPENAI, asynchronous=True),
    "openai-python 2": Client("openai-2", "openai_python.py", _OPENAI),
    "openai-python 2, async": Client("openai-2", "openai_python.py", _OPENAI, asynchronous=True),
}

REQUIREMENTS = {
    "openai-2": ("openai>=2,<3",),
    "openai-3": ("openai>=3,<4",),
}
"""What each environment is locked from."""
