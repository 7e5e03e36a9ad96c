"""Reasoning that clients do not send back: what is put back, for whom, and how much is kept."""

import json
from dataclasses import replace

import pytest

from engine_adapter import JsonBody
from engine_adapter.types import MESSAGES_ROUTES
from proxy.core.normalise import Rule
from proxy.request.normalising import (
    OVERHEAD,
    ChosenRules,
    KeptReasoning,
    Normalising,
    ReasoningSeen,
    _parsed,
)
from proxy.request.tenants import ApiKey, Tenants
from tests.fakes import ASK, CHAT, DONE, INFO, FakeAdapter, client_of, event, proxy_over
from tests.proxy.request.passing import passed

USER = {"role": "user", "content": "How high is the water?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "tide", "arguments": '{"port": "Brest"}'}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "4 m"}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
SAID = {"role": "assistant", "content": "High."}


def chunk(delta, finish=None):
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


async def answers(exchange):
    messages = exchange.json["messages"]
    thought, made = f"Hm, {len(messages)}.", SAID if messages[-1]["role"] == "tool" else CALLED
    if not exchange.json.get("stream"):
        message = {**made, "reasoning_content": thought}
        await exchange.send({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})
        return
    deltas = [{"role": "assistant"}, {"reasoning_content": thought[:2]}, {"reasoning_content": thought[2:]}]
    if made is SAID:
        deltas += [{"content": "Hi"}, {"content": "gh."}]
    else:
        first, *more = ({"arguments": part} for part in ("", '{"port"', ':"Brest"}'))
        deltas.append({"tool_calls": [{**CALL, "index": 0, "function": {"name": "tide", **first}}]})
        deltas += [{"tool_calls": [{"index": 0, "function": part}]} for part in more]
    await exchange.stream(*map(chunk, deltas), chunk({}, "stop"), DONE)


@pytest.fixture
async def client(engine):
    engine.script = answers
    adapter = FakeAdapter("a", engine.url, replace(INFO, served_as_chats=MESSAGES_ROUTES))
    rules = Normalising([ChosenRules(frozenset({Rule.REASONING_KEPT, Rule.VOLATILE_LAST}))])
    tenants = Tenants([ApiKey.of(name, name) for name in ("red", "blue")])
    proxied = proxy_over(adapter, tenants=tenants, normalising=rules)
    async with proxied as proxy, client_of(proxy) as client:
        client.proxy, client.engine = proxy, engine
        yield client
        await proxy.settled()


async def ask(client, *messages, tenant="red", path=CHAT, **fields):
    body = {**ASK, "messages": list(messages), **fields}
    answer = await client.post(path, json=body, headers={"authorization": f"Bearer {tenant}"})
    assert answer.status_code == 200, answer.text
    return answer


def thoughts(client):
    messages = json.loads(client.engine.seen[-1].body)["messages"]
    return [message.get("reasoning_content") for message in messages]


async def test_a_client_may_write_the_same_in_another_form(client):
    await ask(client, USER)
    function = {"name": "tide", "arguments": '{"port":"Brest"}'}
    called = {"role": "assistant", "content": None, "tool_calls": [{**CALL, "function": function}]}
    parts = {"role": "user", "content": [{"type": "text", "text": USER["content"]}]}
    await ask(client, parts, called, RESULT)
    assert thoughts(client)[1] == "Hm, 1."


async def test_that_of_no_other_conversation_or_tenant(client):
    await ask(client, USER)
    for tenant, fields, messages in (
        ("blue", {}, [USER, CALLED]),
        ("red", {"cache_salt": "s"}, [USER, CALLED]),
        ("red", {}, [{"role": "user", "content": "How low?"}, CALLED]),
        ("red", {}, [USER, SAID]),
        ("red", {"n": 1}, [USER, {**CALLED, "reasoning": "My own."}]),
    ):
        await ask(client, *messages, RESULT, tenant=tenant, **fields)
        assert set(thoughts(client)) == {None}, messages


@pytest.mark.parametrize("beside", ["tools", "documents", "chat_template_kwargs"])
async def test_that_of_no_prompt_with_other_things_beside_the_messages(client, beside):
    """Two users of a tenant may ask the same about two documents."""
    one, other = ([{"text": name}] if beside != "chat_template_kwargs" else {"at": name} for name in "ab")
    await ask(client, USER, **{beside: one})
    await ask(client, USER, CALLED, RESULT, **{beside: other})
    assert not any(thoughts(client))
    await ask(client, USER, CALLED, RESULT, **{beside: one})
    assert any(thoughts(client))


async def test_messages_that_leave_it_out(client):
    tool = {"type": "tool_use", "id": "c1", "name": "tide", "input": {"port": "Brest"}}
    fields = {"path": "/v1/messages", "max_tokens": 9}
    answer = await ask(client, USER, **fields)
    assert [block["type"] for block in answer.json()["content"]] == ["thinking", "tool_use"]
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "4 m"}
    history = [USER, {"role": "assistant", "content": [tool]}, {"role": "user", "content": [result]}]
    await ask(client, *history, **fields)
    assert thoughts(client) == [None, "Hm, 1.", None]


async def test_the_same_history_gives_the_same_bytes(client):
    """Each prompt begins with the one before, and with what the engine said to it."""
    talk, before = [USER], []
    for turn in range(8):
        answer = await ask(client, *talk, stream=bool(turn % 2))
        told = ["reasoning_kept"] if turn else []
        assert answer.headers.get_list("x-kvpin-normalised") == client.proxy.last.normalised == told
        sent = json.loads(client.engine.seen[-1].body)["messages"]
        assert sent[: len(before)] == before
        thought, made = f"Hm, {len(talk)}.", SAID if talk[-1] is RESULT else CALLED
        before = [*sent, {**made, "reasoning_content": thought}]
        talk += [made, RESULT if made is CALLED else USER]


def body_of(*messages, **fields):
    return JsonBody(json.dumps({"model": "m", "messages": messages, **fields}).encode())


async def kept_after(*chunks, status=200, whole=False, limit=None):
    """What is put back after an answer to USER that came so."""
    kept = KeptReasoning() if limit is None else KeptReasoning(limit)
    _, keep = await kept.put_back(body_of(USER), None)
    sent = {"whole": chunks[0]} if whole else {"chunks": chunks}
    assert passed(ReasoningSeen(keep), status=status, **sent).body == b"".join(chunks)
    body, _ = await kept.put_back(body_of(USER, SAID), None)
    return json.loads(body.raw)["messages"][1].get("reasoning_content")


DELTA, END = chunk({"reasoning": "Hm.", "content": "High."}), chunk({}, "stop")


async def test_only_of_a_whole_answer():
    assert await kept_after(DELTA[:9], DELTA[9:] + END) == "Hm."
    assert await kept_after(DELTA, END, END) == "Hm."
    assert await kept_after(DELTA) is None
    assert await kept_after(DELTA, END, status=500) is None
    assert await kept_after(DELTA, b"data: {broken\n\n", END) is None
    assert await kept_after(DELTA, b"data: " + b"x" * (65 << 20), END) is None
    assert await kept_after(b"<html>", whole=True) is None
    assert await kept_after(chunk({"content": "High."}, "stop")) is None  # it has none


async def test_memory_is_bounded_and_what_is_used_stays():
    kept = KeptReasoning(limit_bytes=30 + 3 * OVERHEAD)
    for at in range(4):
        _, keep = await kept.put_back(body_of({"role": "user", "content": str(at)}), "red")
        keep("High.", [], "x" * 10)
        body, _ = await kept.put_back(body_of({"role": "user", "content": "0"}, SAID), "red")
        assert b"reasoning_content" in body.raw
    gone, _ = await kept.put_back(body_of({"role": "user", "content": "1"}, SAID), "red")
    assert b"reasoning_content" not in gone.raw


async def test_odd_chats():
    kept = KeptReasoning()
    for messages in (7, "x", [7, {"tool_calls": [7]}], [{"role": "assistant", "tool_calls": {}}]):
        body = JsonBody(json.dumps({"messages": messages}).encode())
        assert (await kept.put_back(body, None))[0] is body
    large = JsonBody(b'{"messages": [{"role": "assistant", "content": [123456789012345678901234567890]}]}')
    assert (await kept.put_back(large, None))[0] is large
    broken = JsonBody(b'{"messages": [{"role": "user", "content": [1e999]}]}')
    assert await kept.put_back(broken, None) == (broken, None)
    assert (await kept.put_back(body_of(USER, n=2), None))[1] is None


def test_arguments_of_very_many_values_are_compared_as_a_text():
    text = "[" + "[]," * 140_000 + "[]]"
    assert _parsed(text) is text
    assert _parsed("[ ]") == []
