"""The work of the soak: random requests of every kind, and what the operator does meanwhile."""

from __future__ import annotations

import base64
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import save

VOCABULARY, HIDDEN, TABLE_ROWS = 4096, 256, 24
CHAT, COMPLETION = "chat/completions", "completions"
MODEL = "kvpin-tiny"
SALTS = (None, None, None, "red", "blue")
SYSTEMS = (
    "You are a harbour pilot. " + "Answer briefly, and name the light you steer by. " * 3,
    "You keep the log of a lighthouse. " + "Write what you see, never what you think. " * 3,
)
TOPICS = ("tides", "lights", "charts", "winds", "knots", "sails", "stars", "żagle 🙂", "ship's biscuit")


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    Attributes:
        path, body: as sent, under `/v1`.
        kind: a word for the summary.
        leave_after: chunks of the answer after which the client hangs up; None to stay.
        answered: gets the text of a whole answer.
    """

    path: str
    body: dict[str, Any]
    kind: str
    leave_after: int | None = None
    answered: Callable[[str], None] = field(default=lambda _: None, repr=False)


def table(seed: int) -> bytes:
    """A p-tuning table, as safetensors."""
    values = torch.randn(TABLE_ROWS, HIDDEN, generator=torch.Generator().manual_seed(seed))
    return save({"table": values * 0.02})


class Workload:
    """Draws requests; `room` is the longest prompt + answer in tokens."""

    def __init__(self, seed: int, room: int, tables: list[str]) -> None:
        self._dice = random.Random(seed)  # noqa: S311 - not for secrets
        self._room = room
        self._tables = tables
        self._chats: list[list[dict[str, str]]] = []
        self._families = [self._tokens(room // 3) for _ in range(4)]
        self._embeds = [base64.b64encode(table(seed)).decode() for seed in (101, 102)]
        self._sent: list[Ask] = []

    def draw(self) -> Ask:
        """The next request."""
        dice = self._dice
        kinds = (self._chat, self._ids, self._table, self._embedding, self._long, self._again)
        path, kind, body, answered = dice.choices(kinds, weights=(40, 25, 12, 8, 3, 12))[0]()
        body = {"model": MODEL, "max_tokens": dice.randint(1, 40), "temperature": 0, **body}
        body |= {"return_token_ids": True, "stream": dice.random() < 0.5}
        if salt := dice.choice(SALTS):
            body["cache_salt"] = salt
        if dice.random() < 0.1:
            # Without top_p: to sort thousands of nearly equal chances is at the mercy of float noise.
            body |= {"temperature": 0.9, "seed": dice.randrange(2**40)}
            kind = "sampled"
        leave = dice.randint(0, 12) if dice.random() < 0.12 else None
        ask = Ask(path, body, kind, leave, answered)
        self._sent = [*self._sent[-200:], ask]
        return ask

    def operation(self, pins: list[str]) -> tuple[str, dict[str, Any]]:
        """The operator's next whim: a verb and its body."""
        dice = self._dice
        verb = dice.choices(
            ("flush", "offload", "restore", "pin", "unpin", "warm"), weights=(1, 4, 4, 3, 2, 3)
        )[0]
        if verb == "unpin" and pins:
            return verb, {"pin_id": pins.pop(dice.randrange(len(pins)))}
        if verb in ("flush", "offload", "restore") and dice.random() < 0.4:
            return verb, {"all": True}
        target: dict[str, Any] = {"model": MODEL, "token_ids": self._cut(dice.choice(self._families))}
        if self._chats and dice.random() < 0.6:
            target = {"model": MODEL, "messages": list(dice.choice(self._chats))}
        if salt := dice.choice(SALTS):
            target["cache_salt"] = salt
        if verb in ("unpin", "pin"):
            return "pin", {**target, "ttl_s": dice.choice((0.2, 1, 5))}
        return verb, target

    # Each returns (path, kind, fields, what to do with the answer's text).

    def _chat(self) -> tuple[str, str, dict[str, Any], Callable[[str], None]]:
        dice = self._dice
        if len(self._chats) < 8:
            self._chats.append([{"role": "system", "content": dice.choice(SYSTEMS)}])
        chat = dice.choice(self._chats)
        question = {
            "role": "user",
            "content": f"Tell me {dice.randint(1, 9)} things of {dice.choice(TOPICS)}.",
        }
        messages = [*chat, question]
        if sum(len(message["content"]) for message in messages) > 2 * self._room:
            self._chats.remove(chat)

        def answered(text: str) -> None:
            if chat == messages[:-1]:
                chat.extend((question, {"role": "assistant", "content": text}))

        return CHAT, "chat", {"messages": messages}, answered

    def _ids(self) -> tuple[str, str, dict[str, Any], Callable[[str], None]]:
        start = self._cut(self._dice.choice(self._families))
        return COMPLETION, "token ids", {"prompt": start + self._tokens(self._dice.randint(0, 30))}, _forget

    def _table(self) -> tuple[str, str, dict[str, Any], Callable[[str], None]]:
        dice = self._dice
        rows = dice.randint(1, TABLE_ROWS)
        prompt = [*range(VOCABULARY, VOCABULARY + rows), *self._cut(self._families[0])]
        fields: dict[str, Any] = {"prompt": prompt, "prompt_table": dice.choice(self._tables)}
        if dice.random() < 0.3:
            fields["extra_ids"] = [dice.choice((7, 8))] * rows + [0] * (len(prompt) - rows)
        return COMPLETION, "table", fields, _forget

    def _embedding(self) -> tuple[str, str, dict[str, Any], Callable[[str], None]]:
        parts = [
            {"type": "text", "text": f"Read {self._dice.choice(TOPICS)}:"},
            {"type": "prompt_embeds", "data": self._dice.choice(self._embeds)},
            {"type": "text", "text": self._dice.choice(TOPICS)},
        ]
        return CHAT, "embeddings", {"messages": [{"role": "user", "content": parts}]}, _forget

    def _long(self) -> tuple[str, str, dict[str, Any], Callable[[str], None]]:
        family = self._dice.choice(self._families)
        prompt = family + self._tokens(self._room - len(family) - self._dice.randint(41, 100))
        return COMPLETION, "long", {"prompt": prompt}, _forget

    def _again(self) -> tuple[str, str, dict[str, Any], Callable[[str], None]]:
        if not self._sent:
            return self._ids()
        old = self._dice.choice(self._sent)
        return old.path, "again", old.body, _forget

    def _tokens(self, count: int) -> list[int]:
        return [self._dice.randrange(200, VOCABULARY) for _ in range(max(count, 1))]

    def _cut(self, tokens: list[int]) -> list[int]:
        return tokens[: self._dice.randint(1, len(tokens))]


def _forget(_text: str) -> None:
    """Nothing follows on this answer."""
