"""Compares the token ids of a chat that is encoded turn by turn with those that transformers gives the whole.

Takes every vocabulary and every chat template that llama-cpp-python ships (fetched from PyPI once, cached
outside the checkout). For each pair, generated chats go turn by turn through kvpin's prompt path:

    incremental   kvpin, which encodes only what follows the known beginning of the chat
    whole         kvpin, which encodes all of it
    transformers  apply_chat_template and the tokenizer's own encode

A vocabulary that kvpin does not read is read by transformers. The markers of all templates, for example
`<|im_start|>`, are added tokens of each vocabulary, as they are of the model that a template belongs to.

    python benchmarks/exactness.py              all pairs, 100 chats each; about an hour on one core
    python benchmarks/exactness.py --chats 3    the same with 3 chats each
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine_adapter import ChatError, EngineSpecError, JsonBody
from engine_adapter.prompt.chat import ChatTokenizer, load_transformers, normalize_messages
from engine_adapter.prompt.encoders import exact_encoder, find_cut
from engine_adapter.prompt.template_trials import content_format
from engine_adapter.types import TokenIds
from proxy.prompt.known_chats import ChatOwner
from proxy.prompt.render import CHAT_PATH, ChatInput, read_prompt
from proxy.prompt.tokenizer import LocalTokenizer
from scripts.shipped_models import shipped_models

_MARKER = re.compile(r"<[|｜]?[A-Za-z][\w▁/-]{1,30}[|｜]?>|</[a-z_]{2,20}>|\[/?[A-Z_]{3,20}\]")


# --- vocabularies ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer, who reads it, and how many of llama.cpp's own test texts it encodes as llama.cpp does."""

    name: str
    tokenizer: Any
    reader: str
    goldens: str


def load(path: Path) -> Vocabulary:
    """The tokenizer of a GGUF file. Its `tokenizer` is None if nobody here reads it."""
    name = path.stem.removeprefix("ggml-vocab-")
    try:
        tokenizer = load_transformers(str(path))
    except EngineSpecError:
        try:
            tokenizer = load_transformers(str(path.parent), gguf_file=path.name)
        except EngineSpecError:
            return Vocabulary(name, None, "nobody: the engine tokenises", "–")
        return Vocabulary(name, tokenizer, "transformers", _goldens(path, tokenizer))
    return Vocabulary(name, tokenizer, "kvpin", _goldens(path, tokenizer))


def _goldens(path: Path, tokenizer: Any) -> str:  # noqa: ANN401 - transformers is untyped
    texts, ids = Path(f"{path}.inp"), Path(f"{path}.out")
    if not texts.exists():
        return "–"
    given = texts.read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    wanted = ids.read_text(encoding="utf-8").split("\n")
    right = sum(
        tokenizer.encode(text, add_special_tokens=False) == [int(word) for word in line.split()]
        for text, line in zip(given, wanted, strict=False)
    )
    return f"{right} of {len(given)}"


# --- chats -----------------------------------------------------------------------------------------

_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} — today's, e.g. 'Kraków'",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
    for name in ("get_weather", "get_time")
]
_WORDS = (
    *(
        "the",
        "Zażółć",
        "漢字",
        "🙂",
        "don't",
        "It's",
        "1234.5",
        "\n\n",
        "\t",
        "  ",
        "def f(x):",
        "https://a/?b=c",
    ),
    *(
        "e\u0301",
        "Ω",
        "한국어",
        "ﬁ",
        "\u00a0",
        "<",
        "|>",
        "</s>",
        "<|im_start|>",
        "<|im_end|>",
        "{{",
        "%}",
        "</think>",
    ),
)


class Chats:
    """Generates chats: lists of messages, and the tools they use."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - not for secrets

    def turns(self) -> Iterator[dict[str, Any]]:
        """The requests of one chat, each with all messages so far."""
        pick = self._random
        tools = _TOOLS if pick.random() < 0.4 else None
        messages: list[dict[str, Any]] = []
        if pick.random() < 0.5:
            messages.append({"role": "system", "content": self._text()})
        for _ in range(pick.randint(1, 5)):
            messages.append({"role": "user", "content": self._content()})
            yield self._request(messages, tools)
            if tools and pick.random() < 0.6:
                messages += self._tool_use()
                yield self._request(messages, tools)
            messages.append(self._answer())

    def _request(self, messages: list[dict[str, Any]], tools: object) -> dict[str, Any]:
        return {"model": "m", "messages": messages} | ({"tools": tools} if tools else {})

    def _answer(self) -> dict[str, Any]:
        answer = {"role": "assistant", "content": self._text()}
        kind = self._random.random()
        if kind < 0.2:
            answer["content"] = f"<think>\n{self._text()}\n</think>\n\n{self._text()}"
        elif kind < 0.4:
            answer["reasoning_content"] = self._text()
        return answer

    def _tool_use(self) -> list[dict[str, Any]]:
        call = {"name": "get_weather", "arguments": '{"city": "Kraków"}'}
        calls = [{"id": "call00001", "type": "function", "function": call}]
        content = self._random.choice(("", None, "Let me look."))
        result = {"role": "tool", "tool_call_id": "call00001", "content": self._text()}
        return [{"role": "assistant", "content": content, "tool_calls": calls}, result]

    def _content(self) -> str | list[dict[str, str]]:
        if self._random.random() < 0.8:
            return self._text()
        return [{"type": "text", "text": self._text()} for _ in range(self._random.randint(1, 3))]

    def _text(self) -> str:
        pick = self._random
        return "".join(
            word + pick.choice((" ", "", " "))
            for word in pick.choices(_WORDS, k=pick.choice((0, 3, 30, 200, 600)))
        )


# --- comparing -------------------------------------------------------------------------------------


async def compare(tokenizer: ChatTokenizer, reference: Any, chats: int) -> Counter[str]:  # noqa: ANN401
    """Counts the turns that were compared, those that the template refused, and those with other ids.

    Args:
        tokenizer: kvpin's.
        reference: that of transformers, with the same chat template.
        chats: how many are generated.
    """
    local = LocalTokenizer(tokenizer, vocab_size=None, hidden_size=None)
    counts = Counter[str]()
    for seed in range(chats):
        for request in Chats(seed).turns():
            body = JsonBody(msgspec.json.encode(request))
            source = read_prompt(CHAT_PATH, body)
            if not isinstance(source, ChatInput):
                raise TypeError("a chat is not read as one")
            wanted = _by_transformers(reference, source)
            ids = [await _turn(local, source, body), await _whole(local, source, body)]
            counts["refused" if wanted is None else "compared"] += 1
            counts["different"] += any(each != wanted for each in ids)
    return counts


def _by_transformers(reference: Any, source: ChatInput) -> array[int] | None:  # noqa: ANN401
    """The ids of a chat; None if its template refuses it."""
    wanted = content_format(reference.get_chat_template(None, source.tools))
    try:
        text = reference.apply_chat_template(
            normalize_messages(source.messages, wanted).messages,
            tools=source.tools,
            add_generation_prompt=True,
            tokenize=False,
        )
    except Exception:  # noqa: BLE001 - a template is a program
        return None
    return array("i", reference.encode(text, add_special_tokens=False))


async def _turn(local: LocalTokenizer, source: ChatInput, body: JsonBody) -> TokenIds[int] | None:
    try:
        return (await local.turn(source, body, ChatOwner()))[0].token_ids
    except ChatError:
        return None


async def _whole(local: LocalTokenizer, source: ChatInput, body: JsonBody) -> TokenIds[int] | None:
    try:
        return (await local.chat(source, body)).token_ids
    except ChatError:
        return None


def measure(models: Path, chats: int, only: str) -> int:
    """Prints both tables, a row as soon as it is known; returns the number of differences."""
    templates = {path.stem: path.read_text(encoding="utf-8") for path in sorted(models.glob("*.jinja"))}
    markers = sorted({marker for text in templates.values() for marker in _MARKER.findall(text)})
    different = 0
    print("| vocabulary | read by | as llama.cpp | template | cut before | turns | refused | different |")
    print("|---|---|---|---|---|---:|---:|---:|")
    for path in sorted(each for each in models.glob("*.gguf") if only in each.name):
        vocabulary = load(path)
        row = f"| {vocabulary.name} | {vocabulary.reader} | {vocabulary.goldens} |"
        reference = vocabulary.tokenizer
        if reference is None:
            print(f"{row} – | – | – | – | – |")
            continue
        reference.add_tokens(markers, special_tokens=True)
        encoder = exact_encoder(reference)
        for name, template in templates.items():
            reference.chat_template = template
            tokenizer = ChatTokenizer(reference, source=name, encoder=encoder)
            counts = asyncio.run(compare(tokenizer, reference, chats))
            different += counts["different"]
            numbers = " | ".join(str(counts[key]) for key in ("compared", "refused", "different"))
            print(f"{row} {name} | {find_cut(tokenizer) or 'encoded whole'} | {numbers} |", flush=True)
    return different


def main() -> None:
    """Compares and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--chats", type=int, default=100, help="chats for each pair (100)")
    parser.add_argument("--vocabulary", default="", help="only those whose name contains this")
    options = parser.parse_args()
    different = measure(shipped_models(), options.chats, options.vocabulary)
    print(f"\n{different} turns differ")
    raise SystemExit(different > 0)


if __name__ == "__main__":
    main()
