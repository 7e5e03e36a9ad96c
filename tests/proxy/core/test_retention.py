import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.body import JsonBody
from engine_adapter.types import Retention
from proxy.core.retention import MAX_TTL_S, PRIORITY, AdminPin, PinBook, retention_of
from proxy.errors import BadRequest

NOTHING = Retention()


def of(**fields):
    return retention_of(JsonBody(json.dumps(fields).encode()))


def kept(ttl_s):
    return Retention(PRIORITY, ttl_s)


def ephemeral(**ttl):
    return {"type": "ephemeral", **ttl}


def chat(*parts):
    return {"messages": [{"role": "user", "content": [*parts]}]}


def marked(**ttl):
    """A part of a message, a tool or a system block that is to be kept."""
    return {"type": "text", "text": "x", "cache_control": ephemeral(**ttl)}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, NOTHING),
        # OpenAI
        ({"prompt_cache_retention": "24h"}, kept(86_400)),
        ({"prompt_cache_retention": "in_memory"}, NOTHING),
        ({"prompt_cache_retention": "in-memory"}, NOTHING),
        ({"prompt_cache_options": {"mode": "implicit", "ttl": "30m"}}, kept(1800)),
        ({"prompt_cache_options": {"ttl": 90}}, kept(90)),
        ({"prompt_cache_options": {"ttl": "45s"}}, kept(45)),
        ({"prompt_cache_options": {"mode": "explicit"}}, NOTHING),
        ({"prompt_cache_options": {"ttl": "30m"}, "prompt_cache_retention": "24h"}, kept(86_400)),
        ({"prompt_cache_options": {"ttl": "2d"}}, kept(MAX_TTL_S)),
        ({"prompt_cache_options": {"ttl": 10**400}}, kept(MAX_TTL_S)),
        # Anthropic
        ({"cache_control": ephemeral()}, kept(300)),
        ({"cache_control": ephemeral(ttl="1h")}, kept(3600)),
        ({"cache_control": ephemeral(ttl=None)}, NOTHING),
        ({"cache_control": None}, NOTHING),
        ({"system": [marked()]}, kept(300)),
        ({"system": "cache_control"}, NOTHING),
        (chat(marked(ttl="1h")), kept(3600)),
        (chat("about cache_control"), NOTHING),
        (chat({"type": "tool_result", "content": [marked(ttl="5m")]}), kept(300)),
        ({"tools": [marked(ttl="5m")]}, kept(300)),
        ({"tools": [marked(ttl="5m")], "system": [marked(ttl="1h")], **chat(marked(), {})}, kept(3600)),
    ],
)
def test_what_clients_ask(fields, expected):
    assert of(**fields) == expected


@pytest.mark.parametrize(
    ("mark", "options", "expected"),
    [
        ({"mode": "explicit"}, {}, kept(1800)),
        ({"mode": "explicit"}, {"ttl": "12h"}, kept(43_200)),
        ({"mode": "explicit", "ttl": "12h"}, {"ttl": "30m"}, kept(43_200)),
        ({"mode": "implicit"}, {}, NOTHING),
        (None, {}, NOTHING),
    ],
)
def test_a_breakpoint_asks_for_its_time_or_the_requests(mark, options, expected):
    part = {"type": "text", "text": "x", "prompt_cache_breakpoint": mark}
    for fields in (
        {"messages": [{"role": "user", "content": [part]}]},
        {"input": [{"type": "function_call_output", "output": [part]}]},
    ):
        assert of(**fields, prompt_cache_options=options) == expected


@pytest.mark.parametrize(
    "ttl", ["", "h", "99y", "soon", "1w", "-5m", "5 m", "1.5h", 0, -1, True, [30], {}, "9" * 50 + "s"]
)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (lambda ttl: {"prompt_cache_options": {"ttl": ttl}}, "prompt_cache_options.ttl"),
        (lambda ttl: {"prompt_cache_retention": ttl}, "prompt_cache_retention"),
        (lambda ttl: {"cache_control": ephemeral(ttl=ttl)}, "cache_control.ttl"),
        (
            lambda ttl: {"input": [{"prompt_cache_breakpoint": {"mode": "explicit", "ttl": ttl}}]},
            "input[0].prompt_cache_breakpoint.ttl",
        ),
        (
            lambda ttl: {"messages": [{}, {"content": [{"cache_control": ephemeral(ttl=ttl)}]}]},
            "messages[1].content[0].cache_control.ttl",
        ),
    ],
)
def test_a_time_that_is_none_is_refused(fields, param, ttl):
    with pytest.raises(BadRequest, match=f"^{re.escape(param)} is .*: write a time as '30m'") as caught:
        of(**fields(ttl))
    assert caught.value.param == param
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"prompt_cache_options": "30m"}, "prompt_cache_options", "'30m': it must be an object"),
        ({"cache_control": "ephemeral"}, "cache_control", "'ephemeral': it must be an object"),
        ({"cache_control": {"type": "lasting"}}, "cache_control.type", "'lasting': the only type is"),
        ({"cache_control": {"ttl": "1h"}}, "cache_control.type", "None: the only type is 'ephemeral'"),
        ({"tools": [{}, {"cache_control": True}]}, "tools[1].cache_control", "True: it must be an object"),
    ],
)
def test_a_wish_that_cannot_be_read_is_refused(fields, param, says):
    """Its client would wait for KV that nobody keeps."""
    with pytest.raises(BadRequest) as caught:
        of(**fields)
    assert caught.value.param == param
    assert str(caught.value).startswith(f"{param} is {says}")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.sampled_from(["type", "ttl", "cache_control", "content"]), inner)
    ),
    max_leaves=20,
)


@given(
    fields=st.dictionaries(
        st.sampled_from(
            ["prompt_cache_options", "prompt_cache_retention", "cache_control", "system", "messages", "tools"]
        ),
        JSON,
    )
)
def test_whatever_is_sent_it_is_bounded(fields):
    try:
        retention = of(**fields)
    except BadRequest:
        return
    assert retention == NOTHING or (retention.priority == PRIORITY and 0 < retention.ttl_s <= MAX_TTL_S)


def pin(pin_id="p", engines=("a",), expires=10.0):
    return AdminPin(pin_id, {engine: f"{engine}-pin" for engine in engines}, 4, expires, "label")


def book(*pins):
    result = PinBook()
    for each in pins:
        result.add(each)
    return result


def test_a_pin_holds_until_its_time_is_up():
    pins = book(pin())
    assert pins.active(9.9) == (pin(),)
    assert pins.active(10.0) == ()
    assert pins.active(0.0) == ()


def test_what_comes_and_goes_before_its_time_is_told():
    told = []
    pins = PinBook()
    pins.listeners.append(lambda: told.append(len(pins.active(0.0))))
    pins.add(pin("one"))
    pins.add(pin("two"))
    pins.take("one", 0.0)
    pins.forget_engine("a")
    assert told == [1, 2, 1, 0]


def test_a_lost_engine_takes_its_pins_along():
    pins = book(pin("one", ("a",)), pin("both", ("a", "b")), pin("other", ("b",)))
    pins.forget_engine("a")
    assert [(p.pin_id, dict(p.engine_pins)) for p in pins.active(0.0)] == [
        ("both", {"b": "b-pin"}),
        ("other", {"b": "b-pin"}),
    ]
