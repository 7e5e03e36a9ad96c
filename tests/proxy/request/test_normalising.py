"""Rules on requests: for whom, and who is told."""

import json
import shutil
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from engine_adapter import JsonBody
from engine_adapter.prompt.template_trials import MessageShape
from engine_adapter.types import TRANSLATED_ROUTES
from proxy.core.message_repair import Repair
from proxy.core.misses import detail_of
from proxy.core.normalise import AGENTS, Rule
from proxy.fleet.pool import Pool
from proxy.request.calls import Call, Session
from proxy.request.normalising import NO_RULES, ChosenRules, Normalising
from proxy.request.tenants import ApiKey, Tenants
from tests.fakes import ASK, CHAT, DONE, INFO, FakeAdapter, client_of, event, proxy_over
from tests.kv_world import until
from tests.scripts import sends, streams

TIMES = ("2026-11-25T23:05:44Z", "2026-11-25T23:06:01Z")
DATES = Normalising(
    [
        ChosenRules(frozenset({Rule.DATE_TO_DAY}), tenant="red"),
        ChosenRules(frozenset({Rule.PATHS}), tenant="blue"),
    ]
)


def asked(at, text="Hi"):
    messages = [{"role": "system", "content": f"Now: {at}. Be brief."}, {"role": "user", "content": text}]
    return {**ASK, "messages": messages}


def working_in(path, *more, said="Be brief.", asks="Hi"):
    text = f"The current working directory is `{path}`. {said}"
    messages = [{"role": "system", "content": text}, {"role": "user", "content": asks}, *more]
    return {**ASK, "messages": messages}


@pytest.mark.parametrize(
    ("tenant", "model", "rules"),
    [
        (None, None, set()),
        ("red", None, {Rule.PATHS}),
        ("red", "qwen", {Rule.PATHS, Rule.TOOLS_SORTED}),
        ("blue", "qwen", {Rule.TOOLS_SORTED}),
        ("blue", "other", set()),
    ],
)
def test_rules_are_chosen_by_tenant_and_model(tenant, model, rules):
    chosen = [
        ChosenRules(frozenset({Rule.PATHS}), tenant="red"),
        ChosenRules(frozenset({Rule.TOOLS_SORTED}), model="qwen"),
    ]
    suiting = [each.rules for each in chosen if each.suit(tenant, (model, "alias"))]
    assert frozenset().union(*suiting) == rules


@pytest.fixture
def adapters(engine, tokenizer_dir):
    return [FakeAdapter("a", engine.url, replace(INFO, tokenizer=str(tokenizer_dir)))]


@pytest.fixture
def proxy_options():
    tenants = Tenants([ApiKey.of(name, name) for name in ("red", "blue")])
    return {"reuse": True, "tenants": tenants, "normalising": DATES}


def served_as_chats(client, *routes):
    engine = client.proxy.fleet.engines["a"]
    engine.info = replace(engine.info, served_as_chats=frozenset(routes))


async def ask(client, body, tenant="red", path=CHAT):
    return await client.post(path, json=body, headers={"authorization": f"Bearer {tenant}"})


async def test_the_engine_gets_the_changed_prompt_and_everybody_is_told(engine, client):
    answers = [await ask(client, asked(at)) for at in TIMES]
    assert [answer.headers["x-kvpin-normalised"] for answer in answers] == ["date_to_day"] * 2
    sent = [json.loads(exchange.body)["messages"][0]["content"] for exchange in engine.seen]
    assert sent == ["Now: 2026-11-25. Be brief."] * 2
    first, second = client.proxy.requests
    assert first.prompt.token_ids == second.prompt.token_ids
    assert second.normalised == ["date_to_day"]


async def test_the_miss_is_that_of_the_changed_prompt(client):
    """The system prompts differ as they came, and not as they were computed."""
    for at, text in zip(TIMES, ("Say one. " * 20, "Say two. " * 20), strict=True):
        await ask(client, asked(at, text))
    *_, last = client.proxy.requests
    found = await client.proxy.flow.comparison.explain(last)
    assert (found.miss, found.at.kind) == ("shared_prefix", "input")
    assert detail_of(found).endswith("(the prompt as changed by date_to_day)")


async def test_a_miss_that_a_rule_alone_made_names_the_rule(client):
    """The second request only goes on. It holds a reference, so no path is replaced in it."""
    more = ({"role": "assistant", "content": "Yes"}, {"role": "user", "content": "What is [[path 9]]?"})
    for turns in ((), more):
        await ask(client, working_in("/home/me/x", *turns, said="Be brief. " * 20), "blue")
    first, last = client.proxy.requests
    found = await client.proxy.flow.comparison.explain(last)
    assert (first.normalised, last.normalised, found.miss) == (["paths"], [], "changed_by_kvpin")
    assert f"kvpin's own changes (paths) made it differ from request {first.request_id}" in detail_of(found)


async def test_a_miss_that_the_client_made_is_told_where_it_wrote(client):
    """The rule tells the path before the first turn. The client wrote it in the system prompt."""
    for path in ("/home/me/x", "/home/me/y"):
        await ask(client, working_in(path, said="Be brief. " * 20, asks="Tell more. " * 20), "blue")
    *_, last = client.proxy.requests
    last.reported_tokens = last.predicted_tokens
    found = await client.proxy.flow.comparison.explain(last)
    assert (found.miss, str(found.at)) == ("system_changed", "messages[0], character 43")


PIECES = ['{"file": "[', "[pa", 'th 1]]/a.py"', "}"]


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_path_comes_back_right_where_a_model_repeats_its_reference(engine, client, is_stream):
    def chunk(delta, finish=None):
        return event({"id": "c", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

    def calling(arguments):
        return {"tool_calls": [{"index": 0, "function": {"arguments": arguments}}]}

    if is_stream:
        engine.script = streams(*(chunk(calling(each)) for each in PIECES), chunk({}, "tool_calls"), DONE)
    else:
        engine.script = sends({"id": "c", "choices": [{"index": 0, "message": calling("".join(PIECES))}]})
    systems = set()
    for path in ("/home/me/x", "/home/me/y"):
        answer = await ask(client, {**working_in(path), "stream": is_stream}, "blue")
        assert answer.headers["x-kvpin-normalised"] == "paths"
        said = [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")]
        turns = [each["choices"][0]["delta"] for each in said]
        turns = turns or [each["message"] for each in answer.json()["choices"]]
        calls = [each["tool_calls"][0]["function"]["arguments"] for each in turns if "tool_calls" in each]
        assert json.loads("".join(calls)) == {"file": f"{path}/a.py"}
        system, user = json.loads(engine.seen[-1].body)["messages"]
        systems.add(system["content"])
        assert user["content"] == f"Values in the instructions above:\n[[path 1]]: {path}\n\nHi"
    assert systems == {"The current working directory is `[[path 1]]`. Be brief."}


RESPONSE = {"model": "m", "instructions": "The directory is /home/me/x.", "input": "Hi"}


@pytest.mark.parametrize(
    ("path", "body", "rules"),
    [
        ("/v1/responses", RESPONSE, []),
        ("/v1/responses", {**RESPONSE, "store": False}, ["paths"]),
        (CHAT, working_in("/home/me/x"), ["paths"]),
        (CHAT, {**working_in("/home/me/x"), "store": True}, []),
    ],
    ids=["response", "response unkept", "chat", "kept chat"],
)
async def test_an_answer_that_an_engine_keeps_has_no_reference(client, path, body, rules):
    await ask(client, body, "blue", path)
    assert client.proxy.last.normalised == rules


@pytest.mark.parametrize("store", [{}, {"store": False}])
async def test_a_count_of_a_response_is_that_of_its_prompt(client, store):
    served_as_chats(client, "/v1/responses", "/v1/responses/input_tokens")
    counted = await ask(client, {**RESPONSE, **store}, "blue", "/v1/responses/input_tokens")
    await ask(client, {**RESPONSE, **store}, "blue", "/v1/responses")
    assert counted.json()["input_tokens"] == client.proxy.last.n_tokens


async def test_a_response_that_kvpin_keeps_has_no_reference(engine, client):
    """Its items are the history of the next response, whose references mean other values."""
    served_as_chats(client, "/v1/responses")
    answer = (await ask(client, RESPONSE, "blue", "/v1/responses")).json()
    headers = {"authorization": "Bearer blue"}
    items = await client.get(f"/v1/responses/{answer['id']}/input_items", headers=headers)
    assert "[[path" not in items.text
    goes_on = {"instructions": "The directory is /home/me/y.", "previous_response_id": answer["id"]}
    last = await ask(client, {**RESPONSE, **goes_on, "store": False}, "blue", "/v1/responses")
    assert last.json()["instructions"] == goes_on["instructions"]
    sent = engine.seen[-1].body.decode()
    assert "/home/me/y" in sent
    assert "/home/me/x" not in sent


async def test_no_value_is_replaced_where_a_message_holds_a_reference(engine, client):
    """An answer that repeats it would get a path that the message does not mean."""
    body = working_in("/home/me/x", {"role": "user", "content": "What is [[path 1]]?"})
    answer = await ask(client, body, "blue")
    assert "x-kvpin-normalised" not in answer.headers
    assert json.loads(engine.seen[-1].body) == body


async def test_another_tenants_prompt_stays(engine, client):
    answer = await ask(client, asked(TIMES[0]), "blue")
    assert "x-kvpin-normalised" not in answer.headers
    assert json.loads(engine.seen[0].body) == asked(TIMES[0])
    assert client.proxy.last.normalised == []


async def test_the_billing_line_of_messages_is_always_dropped_and_never_silently(engine, client):
    served_as_chats(client, "/v1/messages")
    line = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=a5145;"}
    answer = await ask(client, {**ASK, "max_tokens": 4, "system": [line]}, "blue", "/v1/messages")
    assert answer.headers["x-kvpin-normalised"] == "billing_line"
    assert [each["role"] for each in json.loads(engine.seen[0].body)["messages"]] == ["user"]


async def test_tools_that_are_nested_too_deeply_stay_as_they_are():
    schema = b'{"a":' * 700 + b"1" + b"}" * 700
    body = JsonBody(b'{"messages": [], "tools": [{"name": "f", "parameters": %b}]}' % schema)
    assert await Normalising([ChosenRules(AGENTS)]).apply(Call("r", "POST", CHAT, None, body), "m") is None


STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first!') }}"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)


@pytest.fixture
def strict_tokenizer(tokenizer_dir, tmp_path):
    directory = tmp_path / "strict"
    shutil.copytree(tokenizer_dir, directory)
    (directory / "chat_template.jinja").write_text(STRICT)
    return directory


@pytest.mark.parametrize("is_on", [True, False])
async def test_messages_that_the_template_loses_are_repaired(engine, strict_tokenizer, is_on):
    adapter = FakeAdapter("a", engine.url, replace(INFO, tokenizer=str(strict_tokenizer)))
    chosen = Normalising([ChosenRules(frozenset(), repairs=is_on)])
    turns = [{"role": role, "content": f"{role}'s words"} for role in ("system", "user", "system")]
    async with proxy_over(adapter, reuse=True, normalising=chosen) as proxy, client_of(proxy) as client:
        await until(lambda: proxy.fleet.engines["a"].is_proven)
        answer = await client.post(CHAT, json={**ASK, "messages": turns})
        await proxy.settled()
        sent = json.loads(engine.seen[-1].body)["messages"]
    if not is_on:
        assert sent == turns
        return
    assert sent == [turns[0], {**turns[1], "content": "user's words\n\n<system>\nsystem's words\n</system>"}]
    assert answer.headers["x-kvpin-normalised"] == "late_system_in_turn"
    assert proxy.last.normalised == ["late_system_in_turn"]


async def test_a_repair_is_in_the_log_once_for_each_session():
    body = JsonBody(b'{"messages": [{"role": "user", "content": "A"}, {"role": "user", "content": "B"}]}')
    one, other = Session("red", "talk-1"), Session("red", "talk-2")
    with capture_logs() as logs:
        for session in (one, one, other, None, None):
            call = Call("r", "POST", CHAT, None, body, session=session)
            changed, applied, _ = await NO_RULES.apply(call, "a model of this test", {MessageShape.TURNS})
            assert applied == (Repair.TURNS_ALTERNATE,)
            assert changed.body.view("messages") == [{"role": "user", "content": "A\n\nB"}]
    assert [entry["repairs"] for entry in logs] == ["turns_alternate"] * 3
    assert "talk-1" not in str(logs)


TAKES_TOOLS = STRICT.replace(
    "{{ m.content }}",
    "{{ m.content | default('None') }}{% for c in m.tool_calls or [] %}{{ c.function }}{% endfor %}",
).replace("not loop.first", "not loop.first or m.role == 'developer'")
RULES, LATE = ({"role": "developer", "content": text} for text in ("RULES", "new rule"))
CALL_ITEM = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
RESULT_ITEM = {"type": "function_call_output", "call_id": "1", "output": "7"}


def user_item(text):
    return {"role": "user", "content": text}


class TestRepairsOfTranslatedChats:
    """What is repaired of a request that kvpin serves as a chat is the chat, with the stored turns in it."""

    @pytest.fixture
    async def ask(self, engine, strict_tokenizer):
        """Asks for a response; gives the chat's messages, as role and content, and the answer."""
        (strict_tokenizer / "chat_template.jinja").write_text(TAKES_TOOLS)
        info = replace(INFO, tokenizer=str(strict_tokenizer), served_as_chats=TRANSLATED_ROUTES)
        engine.script = sends(
            {"choices": [{"index": 0, "message": {"content": "ok"}, "finish_reason": "stop"}]}
        )
        adapter = FakeAdapter("a", engine.url, info)
        async with proxy_over(adapter, reuse=True) as proxy, client_of(proxy) as client:
            await until(lambda: proxy.fleet.engines["a"].is_proven)

            async def ask(path="/v1/responses", status=200, **fields):
                answer = await client.post(path, json={"model": "m", **fields})
                await proxy.settled()
                assert answer.status_code == status, answer.text
                sent = json.loads(engine.seen[-1].body)["messages"] if engine.seen else []
                return [(each["role"], each["content"]) for each in sent], answer

            yield ask

    async def test_a_developers_message_stays_in_the_stored_turn(self, ask):
        begun, first = await ask(instructions="A", input=[RULES, user_item("first")])
        assert begun == [("system", "A\n\nRULES"), ("user", "first")]
        assert first.headers["x-kvpin-normalised"] == "developer_as_system,systems_joined"
        assert first.json()["instructions"] == "A"
        sent, _ = await ask(instructions="A", input="second", previous_response_id=first.json()["id"])
        assert sent == [*begun, ("assistant", "ok"), ("user", "second")]

    async def test_a_late_one_leaves_what_stands_before_it(self, ask):
        begun, first = await ask(instructions="A", input="first")
        late = {"instructions": "A", "input": [LATE, user_item("second")]}
        sent, second = await ask(**late, previous_response_id=first.json()["id"])
        told = ("user", "<system>\nnew rule\n</system>\n\nsecond")
        assert sent == [*begun, ("assistant", "ok"), told]
        sent, _ = await ask(instructions="A", input="third", previous_response_id=second.json()["id"])
        assert sent == [*begun, ("assistant", "ok"), told, ("assistant", "ok"), ("user", "third")]

    @pytest.mark.parametrize("instructions", [{}, {"instructions": "A"}], ids=["none", "new"])
    async def test_the_head_of_an_input_is_not_that_of_the_talk(self, ask, instructions):
        _, first = await ask(input=[RULES, user_item("first")])
        goes_on = {"input": [LATE, user_item("second")], "previous_response_id": first.json()["id"]}
        sent, _ = await ask(**goes_on, **instructions)
        assert sent == [
            ("system", "A\n\nRULES" if instructions else "RULES"), ("user", "first"), ("assistant", "ok"),
            ("user", "<system>\nnew rule\n</system>\n\nsecond"),
        ]  # fmt: skip

    async def test_a_call_has_a_text_beside_it(self, ask):
        sent, answer = await ask(input=[user_item("first"), CALL_ITEM, RESULT_ITEM])
        assert sent == [("user", "first"), ("assistant", ""), ("tool", "7")]
        assert answer.headers["x-kvpin-normalised"] == "null_as_empty"

    @pytest.mark.parametrize("route", ["/v1/responses/input_tokens", "/v1/messages/count_tokens"])
    async def test_a_count_is_that_of_the_repaired_chat(self, ask, route):
        talk = [user_item("first"), {"role": "system", "content": "late"}]
        name = "input" if route.startswith("/v1/responses") else "messages"
        _, counted = await ask(route, **{name: talk})
        said = "first\n\n<system>\nlate\n</system>"
        _, plainly = await ask(route, **{name: [user_item(said)]})
        assert counted.json() == plainly.json()

    async def test_a_message_is_repaired_with_the_turn_that_its_answer_goes_on_with(self, ask, engine):
        talk = [
            user_item("first"),
            {"role": "system", "content": "late"},
            {"role": "assistant", "content": "I"},
        ]
        sent, _ = await ask("/v1/messages", max_tokens=4, messages=talk)
        assert sent == [("user", "first\n\n<system>\nlate\n</system>"), ("assistant", "I")]
        assert engine.seen[-1].json["continue_final_message"] is True

    async def test_it_is_repaired_as_what_it_is_served_as(self, ask, monkeypatch):
        """Engines may join and leave while it is prepared: one look at them decides."""

        async def changes(self, call, *rest):
            served.append(call)
            return await apply(self, call, *rest)

        served, apply = [], Normalising.apply
        monkeypatch.setattr(Normalising, "apply", changes)
        monkeypatch.setattr(
            Pool, "served_as_chats", property(lambda _: set() if served else TRANSLATED_ROUTES)
        )
        sent, _ = await ask(input=[RULES, user_item("first")])
        assert sent == [("system", "RULES"), ("user", "first")]

    @pytest.mark.parametrize(
        ("more", "place"),
        [([], "input[1].content"), ([RULES], "input[1].content"), ([RULES, RULES], "input")],
        ids=["none", "each for itself", "joined"],
    )
    async def test_an_error_names_no_other_place(self, ask, engine, more, place):
        async def refuses(exchange):
            await exchange.send({"error": {"message": "odd", "param": "messages[1].content"}}, status=400)

        engine.script = refuses
        asked = [*more, user_item("first"), user_item("second")]
        _, answer = await ask(input=asked, status=400)
        assert answer.json()["error"]["param"] == place
