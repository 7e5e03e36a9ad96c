"""A request's hold on a slot, and what the request may find and leave there."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_adapter.llama_server.answer import Answer
from engine_adapter.llama_server.slot_owners import UNKNOWN_OWNER
from engine_adapter.llama_server.turns import Ask
from engine_adapter.types import TokenIds


@dataclass(slots=True)
class SlotLease:
    """A request's hold on a slot.

    Attributes:
        slot: the slot's id.
        ask: the prompt that the request brought.
        cached_tokens: prompt tokens the server will report as reused.
        firm: False if the server may report more.
        may_reuse: whether the request may use KV that lies in the slot.
        restored: the slot's KV came from a file just before.
        before: known tokens the slot held, if the request may use them.
        length_before: tokens the slot held, known or not.
        started: when the request could be sent.
        answer: what the answer said; None until it has ended, or if it never did.
        has_begun: the first bytes of the answer have come.
        shows_text: the answer's text is all that was sampled: nothing is held back, parsed or trimmed.
    """

    slot: int
    ask: Ask
    cached_tokens: int
    firm: bool
    may_reuse: bool
    restored: bool
    before: TokenIds[int] = field(repr=False)
    length_before: int
    started: float
    answer: Answer | None = None
    has_begun: bool = False
    shows_text: bool = True

    @property
    def leaves_own(self) -> bool:
        """Whether all KV in the slot is now its own client's, although the prompt's tokens are not known."""
        answer, ask = self.answer, self.ask
        is_done = answer is not None and answer.is_complete and answer.error is None
        return is_done and not ask.tokens and ask.salt != UNKNOWN_OWNER
