import msgspec
import pytest

from engine_adapter.prompt.chat import ChatTokenizer, load_transformers
from engine_adapter.prompt.described import DescribedTokenizer, Description, describe

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def reference(tokenizer_dir):
    return load_transformers(str(tokenizer_dir))


def again(tokenizer):
    """Through a description that went over a wire."""
    wire = msgspec.msgpack.encode(describe(tokenizer))
    described = DescribedTokenizer(msgspec.msgpack.decode(wire, type=Description))
    return ChatTokenizer(described, source="here", encoder=described.encoder)


def test_a_described_tokenizer_is_the_same(reference):
    tokenizer = again(reference)
    assert tokenizer.vocab_size == len(reference)
    assert tokenizer.eos_token_id == reference.eos_token_id
    ids = tokenizer.chat(HELLO).token_ids.tolist()
    assert ids == list(reference.apply_chat_template(HELLO, add_generation_prompt=True, return_dict=False))
    assert tokenizer.decode(ids) == reference.decode(ids)


def test_templates_by_name(tokenizer_dir):
    tokenizer = load_transformers(str(tokenizer_dir))
    tokenizer.chat_template = {"default": "plain", "tool_use": "tools {{ eos_token }}"}
    described = again(tokenizer)
    assert described.render(HELLO) == "plain"
    assert described.render(HELLO, tools=[{}]) == f"tools {tokenizer.eos_token}"


def test_special_tokens_may_be_text(tokenizer_dir):
    tokenizer = load_transformers(str(tokenizer_dir))
    tokenizer.split_special_tokens = True
    text = f"a{tokenizer.eos_token}b"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert again(tokenizer).encode(text, add_special_tokens=False).tolist() == ids
    assert tokenizer.eos_token_id not in ids


def test_one_that_only_transformers_gives_right_is_not_described(reference):
    class Python:
        """A tokenizer without a backend in Rust."""

        def encode(self, text, add_special_tokens):
            return []

    assert describe(Python()) == Description("transformers")
