from pathlib import Path

import pytest

from proxy import api
from proxy.cli import decisions
from proxy.control.explain import CostAnswer
from proxy.core import reasons
from proxy.core.placement.decision import TERMS, Cost

WHY = "e1 holds 3,200 of [4,000] tokens, but 1.9 s of prefill wait there"


def cost(engine, **terms):
    names = ("queue", "room", "restore", "prefill", "interference", "congestion", "later", "regret", "total")
    nothing = {f"{name}_s": 0.0 for name in names}
    return nothing | {"engine": engine, "cached_tokens": 0, "in_flight": 0} | terms


COSTS = [
    cost("e1", cached_tokens=131_072, queue_s=23.4564, prefill_s=0.2, regret_s=None, total_s=24.5),
    cost("tensorrt_llm-12", prefill_s=1.0, congestion_s=3.0, total_s=4.0, interference_s=0.0042),
]
DECISION = {"rule": "lowest cost", "why": WHY, "utilisation": 0.75, "strain": 4.0}
ROUTE = DECISION | {"engine": "tensorrt_llm-12", "n_tokens": 4000, "candidates": COSTS, "is_firm": True}
REQUEST = {
    "started": 1_800_000_000.5, "tenant": "acme", "model": "qwen", "route": "/v1/chat/completions",
    "request_id": "r[1]", "engine": "tensorrt_llm-12", "status": 200, "error": None, "cause": "answered",
    "n_tokens": 4000,
    "predicted_tokens": 0, "is_firm": True, "reported_tokens": 0, "stream": True,
    "expected_first_token_s": 1.0,
    "first_byte_s": 1.01, "duration_s": 1.5, "explanation": "why [bold]", "divergence": None,
    "prefilled_by": None, "transfer": None,
    "miss": "input_changed", "differs_at": "messages[1], character 17", "queued_s": None,
    "first_byte_parts": None,
    "decision": DECISION | {"costs": COSTS},
}  # fmt: skip
WHOLE = "answer 1760.0 ms after the request came: tokenise 10.0 ms, hold 1700.0 ms, engine 50.0 ms\n"
LONG = "first byte 1760.0 ms after the request came: tokenise 10.0 ms, hold 1700.0 ms, engine 50.0 ms\n"


def told(capsys, show, answer):
    """What it prints."""
    show(answer)
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("route", "rows", "said"),
    [
        (  # a wait for room, where there is one
            {"candidates": [COSTS[0], COSTS[1] | {"room_s": 0.7}]},
            [["engine", "cached", "queue", "room"], ["tensorrt_llm-12", "0", "0", "700"], ["e1", "131,072"]],
            "",
        ),
        (  # of load alone, no terms
            {"rule": "least loaded", "engine": "e0", "n_tokens": None,
             "candidates": [cost("e0", in_flight=2), cost("e1", in_flight=3)]},
            [["engine", "in", "flight"], ["e0", "2"], ["e1", "3"]], "",
        ),
        (  # a pair, by its two engines
            {"engine": "d", "candidates": [
                cost("d", transfer_s=0.0, stall_s=0.5, total_s=4.0),
                cost("d", prefiller="p", transfer_s=0.05, stall_s=0.0, total_s=2.0)]},
            [["engine", "cached", "queue", "restore", "prefill", "transfer", "decode", "stall"],
             ["p", "→", "d", "0"], ["d", "0"]],
            "stall: streams and requests that its prefill delays",
        ),
        (
            {"note": "no tenant is named"}, [],
            f"{WHY}\nno tenant is named\n",
        ),
        (
            {"is_firm": False}, [],
            "tensorrt_llm-12 may reuse another number of tokens: its prediction is not firm\n",
        ),
    ],
)  # fmt: skip
def test_the_costs_of_a_route(capsys, route, rows, said):
    output = told(capsys, decisions.show_route, ROUTE | route)
    lines = [line.split() for line in output.splitlines()]
    at = next(number for number, line in enumerate(lines) if line[:1] == ["engine"])
    assert [line[: len(row)] for line, row in zip(lines[at:], rows, strict=False)] == rows
    assert said in output


def test_a_past_request_shows_why_it_went_there_and_when_it_was_expected(capsys):
    output = told(capsys, decisions.show_request, REQUEST)
    for text in ("r[1]", "why [bold]", f"placed on tensorrt_llm-12: {WHY}", "3,000", "4.0 times"):
        assert text in output
    assert output.endswith("first token expected after 1000.0 ms, came after 1010.0 ms\n")
    for other in ({"stream": False}, {"first_byte_s": None}, {"expected_first_token_s": None}):
        assert "first token" not in told(capsys, decisions.show_request, REQUEST | other)
    parts = {"first_byte_parts": {"tokenise": 0.01, "hold": 1.7, "engine": 0.05}}
    assert told(capsys, decisions.show_request, REQUEST | parts).endswith(LONG)
    assert told(capsys, decisions.show_request, REQUEST | parts | {"stream": False}).endswith(WHOLE)


def test_a_prompt_is_never_read_as_markup(capsys):
    divergence = {"request_id": "r0", "common_tokens": 3, "text": "[/x]", "other_text": "[red]y"}
    gone = dict.fromkeys(("status", "engine", "miss", "differs_at", "decision", "n_tokens"))
    failed = gone | {"error": "bad [/] tag", "divergence": divergence}
    output = told(capsys, decisions.show_request, REQUEST | failed)
    for text in ("why [bold]", "[/x]", "[red]y", "1500.0 ms", "from token 3 on", "bad [/] tag", "r[1]"):
        assert text in output
    assert "placed on" not in output


@pytest.mark.parametrize(
    ("text", "other_text", "said", "unsaid"),
    [
        (None, None, "", "from token"),  # it cannot be shown
        ("and on", "", "request r0 had its first 3 tokens as its prompt", "''"),
        ("", "", "request r0 had the same prompt", "from token"),
    ],
)
def test_a_prompt_beside_an_earlier_one(capsys, text, other_text, said, unsaid):
    divergence = {"request_id": "r0", "common_tokens": 3, "text": text, "other_text": other_text}
    output = told(capsys, decisions.show_request, REQUEST | {"divergence": divergence})
    assert said in output
    assert unsaid not in output


ENDED = "4000 0 0 1010.0 ms 1500.0 ms"


@pytest.mark.parametrize(
    ("fields", "row"),
    [
        ({}, f"tensorrt_llm-12 200 {ENDED} input_changed: messages[1], character 17"),
        (
            {"status": 400, "cause": "invalid", "error": "prompt [is] too long", "miss": None},
            f"tensorrt_llm-12 400 {ENDED} invalid: prompt [is] too long",
        ),
        ({"miss": "hit", "differs_at": None, "normalised": ["x"]}, f"tensorrt_llm-12 200 {ENDED} hit *"),
        ({"queued_s": 3.21, "differs_at": None}, f"tensorrt_llm-12 200 {ENDED} queued 3.2 s; input_changed"),
        (
            {"queued_s": 0.04, "cause": "overloaded", "error": "all are busy"},
            f"tensorrt_llm-12 200 {ENDED} queued 0.0 s; overloaded: all are busy",
        ),
        (
            {"predicted_tokens": 2416, "is_firm": False, "differs_at": None},
            "tensorrt_llm-12 200 4000 ~2416 0 1010.0 ms 1500.0 ms input_changed",
        ),
        (
            {"prefilled_by": "p", "transfer": "moved", "differs_at": None},
            f"p → tensorrt_llm-12 200 {ENDED} input_changed",
        ),
        (
            {"prefilled_by": "p", "transfer": "late", "differs_at": None},
            f"tensorrt_llm-12 200 {ENDED} no KV from p: late; input_changed",
        ),
    ],
)
def test_a_row(capsys, fields, row):
    output = told(capsys, decisions.show_requests, [REQUEST | fields])
    assert ("~ not firm: the engine may reuse another number" in output) is (fields.get("is_firm") is False)
    assert " ".join(output.splitlines()[1].split()) == f"08:00:00 r[1] acme qwen /v1/chat/completions {row}"


def test_no_term_of_a_cost_is_forgotten_where_costs_are_shown():
    static = Path(api.__file__).parent / "static"
    script, style = (static / "why.js").read_text(), (static / "style.css").read_text()
    for term in TERMS:
        assert term in decisions._TERMS
        assert f'["{term}", ' in script
        assert f".{term} {{" in style
        assert term in {*reasons._PRICES, *reasons._OBSTACLES, "transfer_s"}, "a sentence names the transfer"
        assert Cost("a", **{term: 1.0}).first_token_s or f"`{term}`" in CostAnswer.__doc__
