from itertools import product

import pytest

from engine_adapter.body import JsonBody
from engine_adapter.lmcache.verbs import embeddings_of, is_under, salt_for, without_lora
from tests.engine_adapter.builders import body

TENANT = "kvpin-" + "0" * 32 + "-" + "1" * 32  # kvpin's own are as long as this


@pytest.mark.parametrize("salt", [None, "s", TENANT, "ünï cøde"])
def test_text_without_an_adapter_keeps_its_salt(salt):
    assert salt_for(salt) == salt


def test_no_two_kinds_of_kv_share_a_salt():
    salts = (None, "s", "t", TENANT, "a/b", "a@b", "a\\b", "a\0b", "x" * 128, "~" * 33)
    adapters = (None, "ada", "lin", "s", "")
    embeddings = (None, "e1", "e2", "ada")
    sent = [salt_for(*kind) for kind in product(salts, adapters, embeddings)]
    assert len(set(sent)) == len(sent)
    # A client's own salt that looks like one made here is another's all the same.
    assert not {salt_for(made) for made in sent if made and "~" in made} & set(sent)


def test_every_salt_is_one_that_lmcache_takes():
    for salt in ("a/b", "a@b", "a\\b", "a\0b", "x" * 129, "x" * 128, "~", TENANT, "x" * 95):
        sent = salt_for(salt, "an adapter", "embeddings")
        assert len(sent) <= 128
        assert not set("@/\\\0") & set(sent)


@pytest.mark.parametrize("salt", [None, "s", TENANT])
def test_what_vllm_tells_of_is_the_requests_own(salt):
    assert without_lora(salt_for(salt, "ada"), "ada") == salt
    assert without_lora(salt, None) == salt
    assert without_lora(salt, "ada") == salt
    assert without_lora(salt_for(salt, "lin"), "ada") == salt_for(salt, "lin")


def test_a_salt_is_found_with_all_its_adapters():
    for adapter in (None, "ada"):
        assert is_under(salt_for("s", adapter), "s")
        assert is_under(salt_for("a/b", adapter), "a/b")
        assert not is_under(salt_for("st", adapter), "s")
        assert not is_under(salt_for(None, adapter) or "", "s")


def test_embeddings_are_told_apart():
    one, two = (embeddings_of(body(model="m", prompt_embeds=text)) for text in ("QQ==", "Qg=="))
    assert None not in (one, two)
    assert one != two
    assert one == embeddings_of(body(prompt_embeds="QQ==", temperature=0))
    several = [embeddings_of(body(prompt_embeds=texts)) for texts in (["QQ==", "Qg=="], ["QQ==Qg=="])]
    assert several[0] != several[1]


def test_embeddings_within_messages_are_those_of_the_very_same_request():
    def chat(data):
        return body(messages=[{"role": "user", "content": [{"type": "prompt_embeds", "data": data}]}])

    assert embeddings_of(chat("QQ==")) not in (None, embeddings_of(chat("Qg==")))


def test_embeddings_are_seen_however_they_are_written():
    raw = body(messages=[{"content": [{"type": "prompt_embeds", "data": "QQ=="}]}]).raw
    assert embeddings_of(JsonBody(raw.replace(b"prompt_embeds", b"prompt\\u005fembeds"))) is not None
    assert embeddings_of(body(messages=[{"content": "\0"}])) is None


@pytest.mark.parametrize(
    "fields", [{"prompt": 'say "prompt_embeds"'}, {"prompt": "x", "prompt_embeds": None}]
)
def test_text_has_none(fields):
    assert embeddings_of(body(**fields)) is None
