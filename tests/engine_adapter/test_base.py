"""An engine without any capability; tests/contract tests those that have some."""

from array import array

import pytest

from engine_adapter import (
    Capability,
    EngineAdapter,
    EngineSpec,
    JsonBody,
    KvTarget,
    KvVerb,
    NotSupported,
    PromptTable,
)

BODY = JsonBody(b"{}")
TARGET = KvTarget(array("i", [1]))
TABLE = PromptTable("t", 1, 1, 1, b"")


class Bare(EngineAdapter):
    spec = EngineSpec("openai_compatible", "http://h:1", "x")


@pytest.mark.parametrize(
    ("call", "capability"),
    [
        (lambda bare: bare.tokenize("/v1/completions", BODY), Capability.TOKENIZE),
        (lambda bare: bare.render("/v1/completions", BODY), Capability.RENDER),
        (lambda bare: anext(bare.events()), Capability.KV_EVENTS),
        (lambda bare: anext(bare.operate(KvVerb.FLUSH, TARGET)), Capability.FLUSH),
        (lambda bare: anext(bare.operate(KvVerb.OFFLOAD, TARGET)), Capability.OFFLOAD),
        (lambda bare: anext(bare.operate(KvVerb.RESTORE, TARGET)), Capability.RESTORE),
        (lambda bare: bare.pin(TARGET, 1.0), Capability.PIN),
        (lambda bare: bare.unpin("p"), Capability.PIN),
        (lambda bare: bare.put_prompt_table(TABLE), Capability.PROMPT_TABLES),
        (lambda bare: bare.delete_prompt_table("t"), Capability.PROMPT_TABLES),
    ],
)
async def test_what_is_not_declared_is_refused(call, capability):
    with pytest.raises(NotSupported, match=f"engine 'x' has no '{capability.value}': ") as caught:
        await call(Bare())
    assert caught.value.capability == capability.value
    assert caught.value.instead


async def test_requests_go_as_they_are_and_nothing_is_foreseen():
    bare = Bare()
    assert bare.forecast(TARGET) is None
    async with bare.hold("/v1/completions", BODY, TARGET) as hold:
        assert hold.body is BODY
        assert (hold.cached_tokens, hold.answer) == (None, None)


async def test_what_is_only_asked_has_an_empty_answer():
    bare = Bare()
    assert (bare.cached_tokens({"x-kv-cached-tokens": "5"}), bare.findings()) == (None, ())
    assert await bare.stats() == {}
    assert bare.event_position() is None
    assert await bare.lookup(TARGET) is None
    await bare.leave()  # forgets nothing
