"""Requests and outputs of the engine: plain data, without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import msgspec

from engine_adapter.errors import EngineError, FieldError
from engine_adapter.types import NOT_RETAINED, ExtraIds, Retention, TokenIds

if TYPE_CHECKING:
    from torch import Tensor

    from engine_adapter.torch_engine.grammar import Grammar

FinishReason = Literal["stop", "length", "cancelled", "error", "refused"]
"""`error`: the engine failed on this very request. `refused`: the request asks for what cannot be done.
`cancelled`: the client left, or the engine ended."""


class RequestFailed(EngineError):
    """The engine failed on this request. Another engine would fail on it too: do not retry it elsewhere."""


class PinLimitReached(EngineError):
    """A pin would protect more blocks than pins may hold together."""


class RequestRefused(FieldError):
    """The engine does not take this request: it is empty, too long, or names ids that do not exist."""


class NoScores(ValueError):
    """A model computed a score that is no number."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The rules by which tokens are chosen and an answer stops. The caller has checked the ranges."""

    temperature: float = 1.0  # 0 is greedy
    # top_p, top_k, min_p: 1.0, 0 and 0.0 turn them off.
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None  # equal seeds give equal samples; None draws one from the engine's seed
    # presence_penalty, frequency_penalty: over generated tokens, as OpenAI's.
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and generated tokens, as Hugging Face's; 1.0 is off
    max_tokens: int | None = None  # most tokens to generate; None for as many as the context leaves
    min_tokens: int = 0  # no end, stop token or stop string before this many tokens
    ignore_eos: bool = False  # the model's end tokens do not stop; `stop_token_ids` still do
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None  # None for none; n for those of the chosen token and the n best
    # The same for each token of the prompt. Its KV is then computed whole, not reused.
    prompt_logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, number added to its score), each id once

    def ends(self, of_model: frozenset[int]) -> frozenset[int]:
        """The tokens that end an answer, with those `of_model`."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else of_model)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to continue."""

    request_id: str  # unique among requests in flight
    token_ids: TokenIds[int]  # the prompt. Ids from the vocabulary size on are fake and need an extra id.
    sampling: SamplingParams = SamplingParams()
    extra_ids: ExtraIds[int] | None = None  # one per token, 0 for text; None for text alone
    # Extra id → [rows, hidden]; a fake id stands for row `id - vocab_size`.
    embeddings: Mapping[int, Tensor] = field(default_factory=dict, repr=False)
    cache_salt: str | None = None  # KV is shared only under the same salt
    retention: Retention = NOT_RETAINED  # how long to retain its blocks, and for whom
    # The waiting request with the lowest value runs next; equal ones run in order of arrival.
    priority: int = 0
    answered: int = 0  # so many of the last tokens were generated before, for the same answer
    # Has accepted the tokens that were generated before; None allows every token.
    constraint: Grammar | None = None
    wants_hidden: bool = False  # its tokens come with the hidden states that they were chosen from


class Scheduled(msgspec.Struct, frozen=True, gc=False):
    """The prompt is about to run for the first time. `cached_tokens` of its tokens come from cache."""

    cached_tokens: int


class Token(msgspec.Struct, frozen=True, gc=False):
    """One generated token. The token that stops the request is delivered too.

    Attributes:
        logprob: natural log of its probability under the model alone, None unless asked for.
        top_logprobs: (token id, logprob), best first; None unless asked for.
        hidden: the model's last hidden state before it, as bytes of float32; None unless asked for.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] | None = None
    hidden: bytes | None = None


class PromptScores(msgspec.Struct, frozen=True, gc=False):
    """Logprobs of the prompt's tokens, before the first generated one: the logprob and best tokens, as in
    `Token`, of each token from the second on."""

    scores: list[tuple[float, tuple[tuple[int, float], ...]]]


class Finished(msgspec.Struct, frozen=True, gc=False):
    """The last output of a request. `message` says what went wrong, if anything did. `param` names the field
    for which a request was refused."""

    reason: FinishReason
    message: str | None = None
    param: str | None = None


Output = Scheduled | PromptScores | Token | Finished

OnOutput = Callable[[list[Output]], None]
"""Called in the engine thread with the outputs of one step for one request. Must not block."""
