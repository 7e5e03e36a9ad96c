"""Reads the choices of one answer: tokens in, text and tool calls out."""

from __future__ import annotations

from collections.abc import Sequence

from engine_adapter.torch_engine.answers import Piece
from engine_adapter.torch_engine.detokenize import Detokenizer
from engine_adapter.torch_engine.generation import Outputs
from engine_adapter.torch_engine.requests import Finished, PromptScores, Token
from engine_adapter.torch_engine.tool_calls import CallReader, Found
from engine_adapter.types import TokenIds


class Echo:
    """The prompt, which stands before each choice of a completion with `echo`.

    Attributes:
        text: its text.
        tokens: its tokens, as far as their logprobs are known.
    """

    def __init__(self, text: str, prompt: TokenIds[int], *, with_logprobs: bool) -> None:
        self.text = text
        self.tokens = [Token("", prompt[0])] if with_logprobs else []
        self._prompt = prompt
        self._needed = len(prompt) if with_logprobs else 0

    @property
    def is_ready(self) -> bool:
        """Whether all its logprobs are known."""
        return len(self.tokens) >= self._needed

    def add(self, more: PromptScores) -> None:
        """Adds the logprobs that follow."""
        for logprob, best in more.scores:
            self.tokens.append(Token("", self._prompt[len(self.tokens)], logprob, best))


class ChoiceReader:
    """One choice while it is generated.

    Attributes:
        completion_tokens: tokens that were generated.
        finish_reason: None until it has ended.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        end_tokens: frozenset[int],
        answered: Sequence[int] = (),
        calls: CallReader | None = None,
        echo: Echo | None = None,
        drops: bool = False,
    ) -> None:
        """`answered` are the answer's tokens before it: new text depends on them. `drops`: the client wants
        no token of it."""
        self.completion_tokens = 0
        self.finish_reason: str | None = None
        self._detokenizer = detokenizer
        self._end_tokens = end_tokens
        self._calls = calls
        self._echo = echo
        self._drops = drops
        self._new = Piece("" if echo is None else echo.text)
        for token_id in answered:
            self._read(detokenizer.push(token_id))

    def accept(self, outputs: Outputs) -> None:
        """Reads what the engine made. Nothing counts after the end."""
        for output in outputs:
            if self.finish_reason is not None:
                return
            if isinstance(output, PromptScores):
                if self._echo is not None:
                    self._echo.add(output)
            elif isinstance(output, Token):
                self._accept_token(output)
            elif isinstance(output, Finished):
                self._end("length" if self._drops else output.reason)

    def take(self) -> Piece:
        """Text and tokens since the last call; nothing until the echo is complete."""
        if self._echo is not None:
            if not self._echo.is_ready:
                return Piece()
            self._new.echoed, self._echo = self._echo.tokens, None
        new, self._new = self._new, Piece()
        return new

    def _accept_token(self, token: Token) -> None:
        if self._drops:
            return
        self.completion_tokens += 1
        self._new.tokens.append(token)
        if token.token_id not in self._end_tokens:
            self._add(self._read(self._detokenizer.push(token.token_id)))
        if self._detokenizer.stopped:
            self._end("stop")

    def _end(self, reason: str) -> None:
        self._add(self._read(self._detokenizer.finish()))
        if self._detokenizer.stopped:
            reason = "stop"
        if self._calls is not None:
            self._add(self._calls.finish())
            if reason == "stop" and self._calls.ends_as is not None:
                reason = self._calls.ends_as
        self.finish_reason = self._new.finish_reason = reason

    def _read(self, text: str) -> Found:
        return Found(text) if self._calls is None else self._calls.push(text)

    def _add(self, found: Found) -> None:
        self._new.text += found.text
        self._new.calls += found.calls
