"""Reads the choices of one answer: tokens in, text and tool calls out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine_adapter.torch_engine.answers import Piece
from engine_adapter.torch_engine.detokenize import Detokenizer
from engine_adapter.torch_engine.generation import Outputs
from engine_adapter.torch_engine.requests import Finished, PromptScores, Token
from engine_adapter.torch_engine.tool_calls import CallReader, Found
from engine_adapter.types import TokenIds


@dataclass(slots=True)
class Echo:
    """The prompt, which stands before each choice of a completion with `echo`.

    Attributes:
        text: its text.
        unscored: its tokens, while their logprobs are awaited; None otherwise.
        tokens: its tokens with their logprobs.
    """

    text: str
    unscored: TokenIds[int] | None = None
    tokens: list[Token] = field(default_factory=list)

    def score(self, found: PromptScores) -> None:
        """Takes the logprobs. The first token has none."""
        scores = [(None, None), *found.scores]
        self.tokens = [Token(i, *score) for i, score in zip(self.unscored or (), scores, strict=True)]
        self.unscored = None


@dataclass
class ChoiceReader:
    """One choice while it is generated.

    Attributes:
        answered: the answer's tokens before it: new text depends on them.
        drops: the client wants no token of it.
        finish_reason: None until it has ended.
    """

    detokenizer: Detokenizer
    end_tokens: frozenset[int]
    answered: Sequence[int] = ()
    calls: CallReader | None = None
    echo: Echo | None = None
    drops: bool = False
    completion_tokens: int = field(default=0, init=False)
    finish_reason: str | None = field(default=None, init=False)
    _new: Piece = field(init=False)

    def __post_init__(self) -> None:
        self._new = Piece("" if self.echo is None else self.echo.text)
        for token_id in self.answered:
            self._read(self.detokenizer.push(token_id))

    def accept(self, outputs: Outputs) -> None:
        """Reads what the engine made. Nothing counts after the end."""
        for output in outputs:
            if self.finish_reason is not None:
                return
            if isinstance(output, PromptScores):
                if self.echo is not None:
                    self.echo.score(output)
            elif isinstance(output, Token):
                self._accept_token(output)
            elif isinstance(output, Finished):
                self._end("length" if self.drops else output.reason)

    def take(self) -> Piece:
        """Text and tokens since the last call; nothing until the echo is complete."""
        if self.echo is not None:
            if self.echo.unscored is not None:
                return Piece()
            self._new.echoed, self.echo = self.echo.tokens, None
        new, self._new = self._new, Piece()
        return new

    def _accept_token(self, token: Token) -> None:
        if self.drops:
            return
        self.completion_tokens += 1
        self._new.tokens.append(token)
        if token.token_id not in self.end_tokens:
            self._add(self._read(self.detokenizer.push(token.token_id)))
        if self.detokenizer.stopped:
            self._end("stop")

    def _end(self, reason: str) -> None:
        self._add(self._read(self.detokenizer.finish()))
        if self.detokenizer.stopped:
            reason = "stop"
        if self.calls is not None:
            self._add(self.calls.finish())
            if reason == "stop" and self.calls.ends_as is not None:
                reason = self.calls.ends_as
        self.finish_reason = self._new.finish_reason = reason

    def _read(self, text: str) -> Found:
        return Found(text) if self.calls is None else self.calls.push(text)

    def _add(self, found: Found) -> None:
        self._new.text += found.text
        self._new.calls += found.calls
