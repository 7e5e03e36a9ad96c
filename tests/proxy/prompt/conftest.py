"""A real engine's tokenise route, without the engine: it answers with the same tokenizer, or a wrong one."""

import pytest

from engine_adapter import Capability, EngineInfo, EngineRejected
from engine_adapter.prompt.chat import ChatTokenizer
from engine_adapter.types import token_array
from proxy.prompt.render import AskedInput, ChatInput, read_prompt

VOCAB, HIDDEN = 1000, 4


class TokenizingEngine:
    """The part of an adapter that builders use."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.asked = []
        self.alter = lambda path, body, ids: ids
        self.error = None

    async def tokenize(self, path, body):
        self.asked.append(body)
        if self.error is not None:
            raise self.error
        source = read_prompt(path, body)
        if isinstance(source, AskedInput):
            ids = self.tokenizer.chat([{"role": "user", "content": body.get("input")}]).token_ids
        elif isinstance(source, ChatInput):
            try:
                ids = self.tokenizer.chat(
                    source.messages,
                    tools=source.tools,
                    add_generation_prompt=source.add_generation_prompt,
                    continue_final_message=source.continue_final_message,
                    template_kwargs={
                        key: value
                        for key, value in (source.template_kwargs or {}).items()
                        if key != "messages"
                    },
                ).token_ids
            except Exception as error:
                raise EngineRejected(str(error), status=400) from error
        else:
            ids = self.tokenizer.encode(source.prompt, add_special_tokens=source.add_special_tokens)
        return token_array(self.alter(path, body, ids.tolist()))

    async def tokenize_if_loaded(self, path, body):
        return await self.tokenize(path, body)


@pytest.fixture
def engine(tokenizer_dir):
    return TokenizingEngine(ChatTokenizer.load(str(tokenizer_dir)))


@pytest.fixture
def info_of(tokenizer_dir):
    """EngineInfo of the embedded engine's kind, with changes."""

    def info_of(*capabilities, **changes):
        sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "max_model_len": 2000}
        fields = {"tokenizer": str(tokenizer_dir), "capabilities": frozenset(capabilities), **sizes}
        return EngineInfo(model="m", instance="i", **(fields | changes))

    return info_of


@pytest.fixture
def embedded(info_of):
    return info_of(Capability.TOKENIZE, Capability.EXTRA_IDS, renders_alike=True)
