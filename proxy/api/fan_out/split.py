"""Splits a request into single requests, where it asks for several answers.

The rules are those of engines: choice i of a prompt has the request's seed + i, and the choices of several
prompts are numbered prompt by prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from msgspec import Raw, Struct

from engine_adapter import JsonBody
from engine_adapter.body import TooManyItems
from proxy.errors import BadRequest
from proxy.fleet.pool import Pool

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_PROMPT, _EMBEDS = "prompt", "prompt_embeds"
# As at OpenAI.
MAX_CHOICES = 128
MAX_PARTS = 65_536
# Fields for several choices; `n_cmpl` is another name for `n`.
_CHOICES = frozenset({"n", "n_cmpl", "best_of"})

_STARTS = b'"[{'  # of a prompt within a list


class OnePrompt(Struct, frozen=True):
    """One of several prompts.

    Attributes:
        field: the request's field that holds it.
        value: its item of that field, undecoded; None where the field is the prompt.
    """

    field: str
    value: Raw | None = None


class AnswerPlace(Struct, frozen=True, gc=False):
    """The place of a single request's answer in the joined one. `prompt`: number of its prompt; `index`:
    index of its first choice."""

    prompt: int
    index: int


class SingleRequest(Struct, frozen=True):
    """One of the single requests: its body, and the place of its answer."""

    body: JsonBody
    place: AnswerPlace


class Several(Struct, frozen=True):
    """A request that is several.

    Attributes:
        body: the client's.
        prompts: its prompts; None for the one of its body, which stays as it is.
        choices: choices that the client gets of each prompt.
        parts_per_prompt: single requests for each prompt; 1 where the engine makes the choices.
        shares_prompt: its choices share a prompt that an engine would compute for each of them.
        hides_logprobs: the client did not ask for the logprobs by which the best choices are found.
        listed: its answer is a list of those of the single requests, not a list of choices.
    """

    body: JsonBody
    prompts: list[OnePrompt] | None
    choices: int
    parts_per_prompt: int
    shares_prompt: bool = False
    hides_logprobs: bool = False
    listed: bool = False

    @property
    def picks(self) -> bool:
        """True if the client gets only the best choices of each prompt (`best_of`)."""
        return self.parts_per_prompt > self.choices

    @property
    def part_bytes(self) -> int:
        """The size of the largest body of a part."""
        prompts = self.prompts or []
        sizes = [len(memoryview(prompt.value)) for prompt in prompts if prompt.value is not None]
        if not sizes or len(sizes) < len(prompts):
            return len(self.body.raw)
        return max(len(self.body.raw) - sum(sizes) + max(sizes), 1)

    def forget(self) -> None:
        """Frees the memory of the body: all parts were made."""
        self.body.forget()
        if self.prompts is not None:
            self.prompts.clear()

    def parts(self) -> Iterator[SingleRequest]:
        """The single requests in the order of their choices, each made when it is needed."""
        asked = self.body.hint("seed")  # a negative one asks for another each time
        seed = asked if type(asked) is int and asked >= 0 else None
        for number, prompt in enumerate(self.prompts or [None]):
            for choice in range(self.parts_per_prompt):
                changes: dict[str, Any] = {}
                if prompt is not None:
                    changes |= {_EMBEDS if prompt.field == _PROMPT else _PROMPT: None}
                    if prompt.value is not None:
                        changes[prompt.field] = prompt.value
                if self.parts_per_prompt > 1:
                    changes |= dict.fromkeys(_CHOICES)
                    if seed is not None:
                        changes["seed"] = seed + choice
                if self.hides_logprobs:
                    changes["logprobs"] = 1
                yield SingleRequest(
                    self.body.replace(**changes), AnswerPlace(number, number * self.choices + choice)
                )


def several_of(
    body: JsonBody,
    find_pool: Callable[[], Pool],
    prompts: list[OnePrompt] | None = None,
    *,
    reuse: bool,
    listed: bool = False,
    takes_best: bool = False,
) -> Several | None:
    """The request, split; None if the pool's engines get it unchanged.

    Args:
        body: the request's.
        find_pool: finds the pool of its model; not called for a plain request.
        prompts: what `prompts_of` found, on a route that takes several.
        reuse: kvpin places requests by what engines hold.
        listed: the route is one beside `/v1` that answers with a list.
        takes_best: the route takes `best_of`.

    Raises:
        BadRequest: a number of choices that nobody serves.
        UnreadableField: a field that cannot be decoded.
    """
    has_choices = body.has_any(_CHOICES)
    if prompts is None and not has_choices:
        return None
    pool = find_pool()
    if (pool.runs_several and not reuse) or (body.gives(_EMBEDS) and not pool.takes_embeds):
        prompts = None
    choices = runs = 1
    if has_choices:
        if pool.runs_several:
            asked = body.hint("n")
            choices = asked if type(asked) is int and asked > 0 else 1
        else:
            choices = _number(body, "n" if body.get("n") is not None else "n_cmpl", 1)
            runs = max(choices, _best_of(body, choices) if takes_best else 1)
    n_parts = runs * len(prompts or [None])
    if n_parts == 1:
        return None
    if n_parts > MAX_PARTS:
        raise _too_many(str(n_parts))
    return Several(
        body,
        prompts,
        choices,
        runs,
        shares_prompt=prompts is None and reuse and pool.recomputes_prompts,
        hides_logprobs=runs > choices and body.hint("logprobs") is None,
        listed=listed,
    )


def prompts_of(body: JsonBody, *, listed: bool = False) -> list[OnePrompt] | None:
    """The prompts of a request, undecoded, embeddings first; None for a single one. Looks at each of them.
    Raises BadRequest: there are more than `MAX_PARTS`; UnreadableField: they cannot be decoded."""
    try:
        fields = [name for name in (_EMBEDS, _PROMPT) if body.gives(name)] if not listed else [_PROMPT]
        found = [prompt for name in fields for prompt in _prompts_in(body, name)]
    except TooManyItems:
        raise _too_many(f"more than {MAX_PARTS}") from None
    return found if len(found) > 1 else None


def _too_many(asked: str) -> BadRequest:
    return BadRequest(f"the request asks for {asked} answers; the limit is {MAX_PARTS}", param="prompt")


def _prompts_in(body: JsonBody, name: str) -> list[OnePrompt]:
    """The prompts of a list of texts, lists of token ids and embeddings; else the field itself. A list with a
    number in it is one prompt."""
    items = body.items(name, MAX_PARTS) or []  # too many are refused, whatever their type
    if len(items) <= 1 or any(memoryview(item)[0] not in _STARTS for item in items):
        return [OnePrompt(name)]
    return [OnePrompt(name, item) for item in items]


def _number(body: JsonBody, name: str, default: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or not 1 <= value <= MAX_CHOICES:
        raise BadRequest(f"{name} is a whole number from 1 to {MAX_CHOICES}", param=name)
    return value


def _best_of(body: JsonBody, choices: int) -> int:
    """Choices to make of each prompt, of which the client gets the best."""
    best_of = _number(body, "best_of", choices)
    if best_of < choices:
        raise BadRequest("best_of is at least n", param="best_of")
    if best_of > choices and body.get("stream") is True:
        raise BadRequest(
            "a stream takes no best_of above n: its choices are sent as they are made", param="best_of"
        )
    return best_of
