"""A chat that comes turn by turn gets the ids of the whole, and only its new pieces are encoded."""

import random
import weakref
from array import array

import msgspec
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from engine_adapter import JsonBody
from engine_adapter.prompt.chat import ChatTokenizer
from proxy.core.index.blocks import chain
from proxy.prompt.known_chats import ChatOwner, KnownChats
from proxy.prompt.render import CHAT_PATH, read_prompt
from proxy.prompt.tokenizer import LocalTokenizer

OWNER, TPB = ChatOwner(), 16
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
# Writes earlier messages differently once others follow, as templates of reasoning models do.
FORGETFUL = CHATML.replace("{{ m.content }}", "{{ m.content if loop.last else m.content.split('.')[-1] }}")
WORDS = (
    *("the", "don't", " ", "\n\n", "漢字", "🙂", "e\u0301", "1234", ".", "def ", "<|", "ﬁ"),
    *("<|im_start|>", "<|im_end|>"),
)


def trained(pre_tokenizer, normalizer=None, template=CHATML, **options):
    """A tokenizer as served models have them, whose markers have these options."""
    bpe = Tokenizer(models.BPE())
    bpe.normalizer, bpe.pre_tokenizer, bpe.decoder = normalizer, pre_tokenizer, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator(["the quick brown fox don't jump 1234 漢字 def f(x): return"] * 9, trainer)
    markers = [AddedToken(text, **options) for text in ("<|im_start|>", "<|im_end|>")]
    bpe.add_special_tokens(markers)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, chat_template=template)
    return ChatTokenizer(tokenizer, source="trained")


BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=True)
TOKENIZERS = {
    "byte level": lambda: trained(BYTE_LEVEL, normalizers.NFC()),
    "a space before the first word": lambda: trained(pre_tokenizers.Metaspace(prepend_scheme="first")),
    "a space before each piece": lambda: trained(BYTE_LEVEL, normalizers.Prepend("▁")),
    "markers take space": lambda: trained(BYTE_LEVEL, lstrip=True, rstrip=True),
    "markers stand alone": lambda: trained(BYTE_LEVEL, single_word=True),
    "earlier answers change": lambda: trained(BYTE_LEVEL, template=FORGETFUL),
}


def text(pick, words):
    return "".join(pick.choices(WORDS, k=words))


def request(messages):
    body = JsonBody(msgspec.json.encode({"messages": messages}))
    return read_prompt(CHAT_PATH, body), body


@pytest.mark.parametrize("kind", TOKENIZERS)
async def test_turn_by_turn_gives_the_ids_of_the_whole(kind):
    tokenizer = TOKENIZERS[kind]()
    local, pick = LocalTokenizer(tokenizer, vocab_size=None, hidden_size=None), random.Random(0)  # noqa: S311
    for _ in range(10):
        messages = []
        for _ in range(4):
            messages.append({"role": "user", "content": text(pick, pick.choice((0, 5, 300)))})
            prompt, beginning = await local.turn(*request(messages), OWNER)
            whole = tokenizer.render(messages)
            reference = tokenizer.transformers.encode(whole, add_special_tokens=False)
            assert prompt.token_ids.tolist() == reference
            if beginning is not None:
                known = chain(1, prompt.token_ids, None, TPB, beginning.hashes)
                beginning.learn(known.hashes, TPB)
                assert known == chain(1, prompt.token_ids, None, TPB)
            messages.append({"role": "assistant", "content": text(pick, 100)})
    is_cut = kind not in {"markers take space", "markers stand alone"}
    assert (beginning is not None) == is_cut


@pytest.fixture
def chats():
    return KnownChats("<s>")


def encode(piece):
    return array("i", list(piece.encode()))


def turn(chats, whole, owner=OWNER):
    """The pieces that were encoded, after the ids were checked."""
    chat = chats.read(whole, owner)
    ids, beginning = chats.add(chat, [encode(piece) for piece in chat.new])
    assert ids == encode(whole)
    known = beginning.hashes
    made = chain(7, ids, None, TPB, known)
    assert made == chain(7, ids, None, TPB)
    beginning.learn(made.hashes, TPB)
    return chat.new, len(known)


def message(letter, size=1000):
    return "<s>" + letter * size


def test_only_new_messages_are_encoded_and_hashed(chats):
    a, b, c = map(message, "abc")
    assert turn(chats, a + b + "<s>") == ([a, b, "<s>"], 0)
    assert turn(chats, a + b + c + "<s>") == ([c, "<s>"], len(a + b) // TPB)
    assert turn(chats, a + c + "<s>") == ([c, "<s>"], len(a) // TPB)
    assert turn(chats, b + c + "<s>") == ([b, c, "<s>"], 0)


@pytest.mark.parametrize("other", [ChatOwner(salt="t"), ChatOwner(lora="t"), ChatOwner(tenant="t")])
def test_nothing_is_known_of_others(chats, other):
    whole = message("a") + "<s>"
    turn(chats, whole)
    assert len(turn(chats, whole, other)[0]) == 2
    assert len(turn(chats, whole)[0]) == len(turn(chats, whole, other)[0]) == 1


def test_a_tenant_with_less_than_its_share_loses_nothing():
    chats = KnownChats("<s>", limit_bytes=100_000)
    small, large = ChatOwner(tenant="small"), ChatOwner(tenant="large")
    whole = message("a") + "<s>"
    turn(chats, whole, small)
    for number in range(200):
        turn(chats, f"<s>{number}" + message("b") + "<s>", large)
        assert chats.n_bytes <= 100_000
    assert len(turn(chats, whole, small)[0]) == 1
    assert len(turn(chats, "<s>0" + message("b") + "<s>", large)[0]) > 1


def test_a_segment_ends_only_where_the_next_one_begins(chats):
    turn(chats, message("a") + "<s>")
    assert turn(chats, message("a", 1001) + "<s>")[0] == [message("a", 1001), "<s>"]
    assert turn(chats, message("a", 999) + "<s>")[0] == [message("a", 999), "<s>"]


def test_text_of_any_script_and_half_a_surrogate_pair():
    tokens, chats = (lambda piece: array("i", map(ord, piece))), KnownChats("<s>")
    whole = message("漢") + message("🙂") + message("\ud800") + "<s>"
    for known in (0, 3):
        chat = chats.read(whole, OWNER)
        assert len(chat.known) == known
        assert chats.add(chat, [tokens(piece) for piece in chat.new])[0] == tokens(whole)


def test_what_is_forgotten_frees_its_memory():
    """At once: garbage collection comes rarely."""
    chats, later = KnownChats("<s>", limit_bytes=20_000), encode(message("b"))
    whole, kept = message("a") + message("b") + "<s>", weakref.ref(later)
    chats.add(chats.read(whole, OWNER), [encode(message("a")), later, encode("<s>")])
    del later
    assert kept() is not None
    turn(chats, message("c") + "<s>")
    assert kept() is None
    assert turn(chats, whole)[0] == [message("b"), "<s>"]


def test_two_requests_at_once_share_what_they_encode(chats):
    whole = message("a") + "<s>"
    first, second = chats.read(whole, OWNER), chats.read(whole, OWNER)
    for chat in (first, second):
        ids, _ = chats.add(chat, [encode(piece) for piece in chat.new])
        assert ids == encode(whole)
    n_bytes = chats.n_bytes
    turn(chats, whole)
    assert chats.n_bytes == n_bytes


def test_what_was_forgotten_meanwhile_is_no_error():
    chats = KnownChats("<s>", limit_bytes=12_000)
    turn(chats, message("a") + "<s>")
    chat = chats.read(message("a") + message("b") + "<s>", OWNER)
    turn(chats, message("c") + "<s>")
    turn(chats, message("d") + "<s>")
    ids, _ = chats.add(chat, [encode(piece) for piece in chat.new])
    assert ids == encode(message("a") + message("b") + "<s>")
