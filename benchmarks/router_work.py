"""Workloads for routers: chats and questions about documents, known to the last token before anything runs.

Arrivals are a Poisson process, and what each asks is drawn by the seed alone: every router is sent the same
bytes at the same times. An engine's answer is a function of the prompt (`answer_ids`), so that the next
turn of a chat can be written down beforehand and yet continues what the engine has in its cache.
"""

from __future__ import annotations

import random
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import msgspec
from xxhash import xxh3_64_intdigest

import engine_adapter.torch_engine
from engine_adapter.prompt.chat import ChatTokenizer
from engine_adapter.types import TokenIds
from proxy.core.index.blocks import chain, namespace_root

MODEL = "tiny"
MODEL_DIR = Path(engine_adapter.torch_engine.__file__).parent / "default_model"
BLOCK_TOKENS = 16
SYSTEM_TOKENS = 1000
TURNS = 5
# Nobody answers sooner than this: seconds between two turns of a chat.
THINKING_S = 4.0
WARM_UPS = 12

_Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Mix:
    """The composition of a workload.

    Attributes:
        title: for tables.
        chats: conversations of `TURNS` turns.
        system_prompts: of `SYSTEM_TOKENS` tokens each, shared by the chats in turn.
        questions: about documents, each by itself.
        documents: how many there are.
        document_tokens: of each, from and to.
        kv_tokens: what each engine can hold.
        question_tokens, answer_tokens: of each, from and to.
        requests_per_s: mean rate of arrival.
    """

    title: str
    chats: int
    system_prompts: int
    questions: int
    kv_tokens: int
    question_tokens: tuple[int, int] = (60, 180)
    answer_tokens: tuple[int, int] = (24, 48)
    documents: int = 20
    document_tokens: tuple[int, int] = (2400, 5600)
    requests_per_s: float = 24.0


_CHATS_AND_DOCUMENTS = "200 chats × 5 turns over 8 system prompts, 500 questions about 20 documents"
MIXES = {
    "a": Mix(_CHATS_AND_DOCUMENTS, 200, 8, 500, kv_tokens=100_000),
    "b": Mix(_CHATS_AND_DOCUMENTS, 200, 8, 500, kv_tokens=40_000),
    "c": Mix(
        "300 chats × 5 turns behind one system prompt",
        chats=300,
        system_prompts=1,
        questions=0,
        kv_tokens=100_000,
        question_tokens=(60, 120),
        answer_tokens=(16, 32),
    ),
}


@dataclass(frozen=True, slots=True)
class Question:
    """One request.

    Attributes:
        at: when it is sent, in seconds.
        session: the chat, or the document, it belongs to.
        messages: the chat so far.
        token_ids: the same as the engine sees it.
        answer: token ids of what the engine will say.
    """

    at: float
    session: str
    messages: tuple[_Message, ...]
    token_ids: TokenIds[int] = field(repr=False)
    answer: tuple[int, ...] = field(repr=False)

    @property
    def body(self) -> bytes:
        """The request in JSON."""
        return msgspec.json.encode(
            {
                "model": MODEL,
                "messages": self.messages,
                "max_tokens": len(self.answer),
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )


@cache
def tokenizer() -> ChatTokenizer:
    """The tokenizer of the default model."""
    return ChatTokenizer.load(str(MODEL_DIR))


@cache
def words() -> dict[int, str]:
    """Tokens that are a word each, and their text; a text of them is tokenised into just these."""
    texts = ((token, tokenizer().decode([token])) for token in range(tokenizer().vocab_size))
    return {token: text for token, text in texts if re.fullmatch(" [a-z]{2,}", text)}


def text_of(token_ids: Sequence[int]) -> str:
    """The text of words."""
    known = words()
    return "".join(known[token] for token in token_ids)


def answer_ids(prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """The engine's answer to a prompt: `count` words."""
    dice = random.Random(xxh3_64_intdigest(array("i", prompt).tobytes()))  # noqa: S311 - not for secrets
    return tuple(dice.choices(tuple(words()), k=count))


def make_work(mix: Mix, seed: int) -> list[Question]:
    """The requests of a workload by arrival."""
    return _Author(mix, seed).write()


def make_warm_up() -> list[Question]:
    """A few chats of a sentence each, for connections to be there and code to be loaded."""
    work = []
    for number in range(WARM_UPS):
        messages = [{"role": "user", "content": f"Hello from number {number}."}]
        token_ids = tokenizer().chat(messages).token_ids
        answer = answer_ids(token_ids, 2)
        work.append(Question(number / 10, f"warm-up-{number}", tuple(messages), token_ids, answer))
    return work


def write_trace(work: Sequence[Question], path: Path) -> None:
    """Writes the workload as a trace, as Mooncake has them: hashes of blocks and no text."""
    root = namespace_root(MODEL)
    with path.open("wb") as file:
        for question in work:
            line = {
                "timestamp": round(1000 * question.at, 3),
                "input_length": len(question.token_ids),
                "output_length": len(question.answer),
                "hash_ids": chain(root, question.token_ids, None, BLOCK_TOKENS).hashes,
                "session_id": question.session,
                "block_tokens": BLOCK_TOKENS,
            }
            file.write(msgspec.json.encode(line) + b"\n")


class _Author:
    """Writes a workload down."""

    def __init__(self, mix: Mix, seed: int) -> None:
        self._mix = mix
        self._dice = random.Random(seed)  # noqa: S311 - not for secrets
        self._words = tuple(words())
        systems = [
            {"role": "system", "content": self._text(SYSTEM_TOKENS)} for _ in range(mix.system_prompts)
        ]
        self._chats = [[systems[number % len(systems)]] for number in range(mix.chats)]
        self._documents = [self._text(self._dice.randint(*mix.document_tokens)) for _ in range(mix.documents)]
        self._left = dict.fromkeys(range(mix.chats), TURNS)
        self._last: dict[int, float] = {}

    def write(self) -> list[Question]:
        mix, now = self._mix, 0.0
        kinds = [True] * (mix.chats * TURNS) + [False] * mix.questions
        self._dice.shuffle(kinds)
        work = []
        for is_turn in kinds:
            now += self._dice.expovariate(mix.requests_per_s)
            work.append(self._turn(now) if is_turn else self._document_question(now))
        return work

    def _turn(self, now: float) -> Question:
        """The next turn of a chat that has been left to think for long enough, or else the longest."""
        rested = [chat for chat in self._left if self._last.get(chat, -THINKING_S) <= now - THINKING_S]
        chosen = (
            self._dice.choice(rested) if rested else min(self._left, key=lambda chat: self._last.get(chat, 0))
        )
        self._last[chosen] = now
        self._left[chosen] -= 1
        if not self._left[chosen]:
            del self._left[chosen]
        messages = self._chats[chosen]
        messages.append(
            {"role": "user", "content": self._text(self._dice.randint(*self._mix.question_tokens))}
        )
        question = self._question(now, f"chat-{chosen}", messages)
        messages.append({"role": "assistant", "content": text_of(question.answer)})
        return question

    def _document_question(self, now: float) -> Question:
        number = self._dice.randrange(len(self._documents))
        asked = self._text(self._dice.randint(*self._mix.question_tokens))
        message = {"role": "user", "content": f"{self._documents[number]}\n\n{asked}"}
        return self._question(now, f"document-{number}", [message])

    def _question(self, now: float, session: str, messages: list[_Message]) -> Question:
        token_ids = tokenizer().chat(messages).token_ids
        answer = answer_ids(token_ids, self._dice.randint(*self._mix.answer_tokens))
        return Question(now, session, tuple(messages), token_ids, answer)

    def _text(self, tokens: int) -> str:
        return text_of(self._dice.choices(self._words, k=tokens))
