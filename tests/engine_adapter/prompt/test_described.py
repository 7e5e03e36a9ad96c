import subprocess
import sys
import zlib

import msgspec
import pytest
import tokenizers

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


# --- what lives in the process that keeps it -----------------------------------------------------------


def test_it_renders_encodes_and_decodes_with_one_encoder_and_without_transformers(tokenizer_dir, tmp_path):
    wire = tmp_path / "description"
    wire.write_bytes(msgspec.msgpack.encode(describe(load_transformers(str(tokenizer_dir)))))
    code = f"""
import sys, pathlib, msgspec
from engine_adapter.prompt.chat import ChatTokenizer
from engine_adapter.prompt.described import DescribedTokenizer, Description
wire = pathlib.Path({str(wire)!r}).read_bytes()
described = DescribedTokenizer(msgspec.msgpack.decode(wire, type=Description))
chat = ChatTokenizer(described, source="here", encoder=described.encoder)
ids = chat.chat([{{"role": "user", "content": "hello"}}], tools=[{{"type": "function"}}]).token_ids
assert "hello" in chat.decode(ids)
print(chat._encoder.name, *sorted({{"transformers", "tokenizers", "numpy"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["fastokens"]


def test_a_text_or_ids_that_the_encoder_does_not_do_are_done_by_the_other_made_then(reference, monkeypatch):
    description = describe(reference)
    assert (description.encoder, description.decodes) == ("fastokens", True)
    described = DescribedTokenizer(msgspec.structs.replace(description, decodes=False))
    made = []
    from_str = tokenizers.Tokenizer.from_str
    monkeypatch.setattr(
        "tokenizers.Tokenizer",
        type("Watched", (), {"from_str": staticmethod(lambda text: made.append(1) or from_str(text))}),
    )

    class GivesUp:
        def encode_batch_flat(self, *_):
            raise ValueError("match limit exceeded")

    ids = described.encoder.encode("hello", add_special_tokens=False)
    assert made == []
    described.encoder._tokenizer = GivesUp()
    for _ in range(2):
        assert described.encoder.encode("hello", add_special_tokens=False) == ids
        assert described.decode(ids) == "hello"
    assert made == [1]


def test_an_encoder_of_tokenizers_is_the_only_one(reference):
    described = DescribedTokenizer(msgspec.structs.replace(describe(reference), encoder="tokenizers"))
    assert described.encoder.name == "tokenizers"
    ids = list(reference.encode("hello", add_special_tokens=False))
    assert described.encoder.encode("hello", add_special_tokens=False).tolist() == ids
    assert described.decode(ids) == "hello"


def test_ids_that_decode_differently_are_noticed(tokenizer_dir):
    tokenizer = load_transformers(str(tokenizer_dir))
    plain = tokenizer.decode
    tokenizer.decode = lambda *args, **options: plain(*args, **options).strip("\ufffd")
    assert not describe(tokenizer).decodes


def test_where_rules_differ_transformers_renders(reference, monkeypatch):
    monkeypatch.setattr("engine_adapter.prompt.described.renders_alike", lambda _: False)
    description = describe(reference)
    assert not description.renders
    tokenizer = DescribedTokenizer(description)
    monkeypatch.setattr("engine_adapter.prompt.described.render_template", lambda *_, **__: "ours")
    options = {"add_generation_prompt": True, "tokenize": False}
    assert tokenizer.apply_chat_template(HELLO, **options) == reference.apply_chat_template(HELLO, **options)


def test_a_class_that_renders_in_its_own_way_is_not_described(tokenizer_dir, monkeypatch):
    tokenizer = load_transformers(str(tokenizer_dir))
    monkeypatch.setattr(type(tokenizer), "apply_chat_template", lambda *_, **__: "own")
    assert describe(tokenizer) == Description("transformers")


def test_the_description_is_compressed(reference):
    json = reference.backend_tokenizer.to_str().encode()
    description = describe(reference)
    assert len(description.tokenizer) < len(json) / 2
    assert zlib.decompress(description.tokenizer) == json
