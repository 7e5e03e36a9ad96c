import subprocess
import sys

import msgspec
import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from engine_adapter.errors import ChatError
from engine_adapter.prompt import sandbox
from engine_adapter.prompt.chat import ChatTokenizer, load_transformers
from engine_adapter.prompt.described import DescribedTokenizer, Description, describe


@pytest.fixture(scope="module")
def reference(tokenizer_dir):
    return load_transformers(str(tokenizer_dir))


@pytest.fixture(scope="module")
def description(reference):
    return describe(reference)


def again(tokenizer):
    """Through a description that went over a wire."""
    wire = msgspec.msgpack.encode(describe(tokenizer))
    described = DescribedTokenizer(msgspec.msgpack.decode(wire, type=Description))
    return ChatTokenizer(described, source="here", encoder=described.encoder)


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
from engine_adapter.errors import ChatError
from engine_adapter.prompt import sandbox
from engine_adapter.prompt.chat import ChatTokenizer
from engine_adapter.prompt.described import DescribedTokenizer, Description
wire = pathlib.Path({str(wire)!r}).read_bytes()
described = DescribedTokenizer(msgspec.msgpack.decode(wire, type=Description))
chat = ChatTokenizer(described, source="here", encoder=described.encoder)
ids = chat.chat([{{"role": "user", "content": "hello"}}], tools=[{{"type": "function"}}]).token_ids
assert "hello" in chat.decode(ids)
print(chat.encoder.name, *sorted({{"transformers", "tokenizers", "numpy"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["fastokens"]


def test_a_text_or_ids_that_the_encoder_does_not_do_are_done_by_the_other_made_then(description, monkeypatch):
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


def test_an_encoder_of_tokenizers_is_the_only_one(reference, description):
    described = DescribedTokenizer(msgspec.structs.replace(description, encoder="tokenizers"))
    assert described.encoder.name == "tokenizers"
    ids = list(reference.encode("hello", add_special_tokens=False))
    assert described.encoder.encode("hello", add_special_tokens=False).tolist() == ids
    assert described.decode(ids) == "hello"


def test_ids_that_decode_differently_are_noticed(tokenizer_dir):
    tokenizer = load_transformers(str(tokenizer_dir))
    plain = tokenizer.decode
    tokenizer.decode = lambda *args, **options: plain(*args, **options).strip("\ufffd")
    assert not describe(tokenizer).decodes


@pytest.mark.parametrize("odd", ["{{ ('x' * 1100000)[:0] }}", ""])
def test_a_template_is_bounded_whoever_reads_its_tokenizer(description, monkeypatch, odd):
    """Once, transformers rendered what differed from its rendering, without limits."""
    monkeypatch.setattr(sandbox, "MAX_S", 0.2)
    loops = "{% for a in range(99999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
    template = f"{odd}{{% if messages[0].content == 'now' %}}{loops}{{% endif %}}"
    described = DescribedTokenizer(msgspec.structs.replace(description, chat_template=template))
    by_transformers = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()))
    by_transformers.chat_template = template
    for tokenizer in (described, by_transformers):
        chats = ChatTokenizer(tokenizer, source="here", encoder=described.encoder)
        with pytest.raises(ChatError, match=r"CPU time|as long as"):
            chats.render([{"role": "user", "content": "now"}])
