import pytest
from rich.console import Console

from proxy.cli import decisions

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
BALANCED = {"rule": "least loaded", "candidates": [cost("e0", in_flight=2), cost("e1", in_flight=3)]}


@pytest.fixture
def narrow(monkeypatch):
    """A terminal of eighty columns."""
    monkeypatch.setattr(decisions, "console", lambda *_: Console(highlight=False, width=80))


def test_every_term_fits_into_eighty_columns(narrow, capsys):
    decisions.show_route(ROUTE)
    output = capsys.readouterr().out
    lines = [line.split() for line in output.splitlines()]
    assert " ".join(lines[2]) == "engine cached queue restore prefill decode others later regret total"
    assert lines[3] == ["tensorrt_llm-12", "0", "0", "0", "1,000", "4.2", "3,000", "0", "0", "4,000"]
    assert lines[4] == ["e1", "131,072", "23,456", "0", "200", "0", "0", "0", "–", "24,500"]
    assert max(map(len, output.splitlines())) <= 80
    assert "75% utilisation, prefill counts 4.0 times" in output
    assert "later: its next turns wait; regret: KV it evicts" in output
    assert " ".join(output.split()).startswith(f"would go to tensorrt_llm-12: {WHY}")


def test_a_wait_for_room_is_shown_where_there_is_one(capsys):
    decisions.show_route(ROUTE | {"candidates": [COSTS[0], COSTS[1] | {"room_s": 0.7}]})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:4] for line in lines[-5:-2]] == [
        ["engine", "cached", "queue", "room"],
        ["tensorrt_llm-12", "0", "0", "700"],
        ["e1", "131,072", "23,456", "0"],
    ]


def test_engines_chosen_by_load_alone_have_no_terms(capsys):
    decisions.show_route(ROUTE | BALANCED | {"engine": "e0", "n_tokens": None})
    output = capsys.readouterr().out
    assert [line.split() for line in output.splitlines()[1:]] == [
        ["engine", "in", "flight"],
        ["e0", "2"],
        ["e1", "3"],
    ]


def test_a_past_request_shows_why_it_went_there_and_when_it_was_expected(capsys):
    decisions.show_request(REQUEST)
    output = capsys.readouterr().out
    for text in ("r[1]", "why [bold]", f"placed on tensorrt_llm-12: {WHY}", "3,000", "4.0 times"):
        assert text in output
    assert output.endswith("first token expected after 1000.0 ms, came after 1010.0 ms\n")


def test_it_says_what_the_time_to_the_first_byte_was_spent_on(capsys):
    decisions.show_request(REQUEST | {"first_byte_parts": {"tokenise": 0.01, "hold": 1.7, "engine": 0.05}})
    assert capsys.readouterr().out.endswith(
        "first byte 1760.0 ms after the request came: tokenise 10.0 ms, hold 1700.0 ms, engine 50.0 ms\n"
    )


@pytest.mark.parametrize(
    "other", [{"stream": False}, {"first_byte_s": None}, {"expected_first_token_s": None}]
)
def test_only_streams_tell_when_the_first_token_came(capsys, other):
    decisions.show_request(REQUEST | other)
    assert "first token" not in capsys.readouterr().out


def test_a_prompt_is_never_read_as_markup(capsys):
    divergence = {"request_id": "r0", "common_tokens": 3, "text": "[/x]", "other_text": "[red]y"}
    gone = dict.fromkeys(("status", "engine", "miss", "differs_at", "decision", "n_tokens"))
    gone["error"] = "bad [/] tag"
    decisions.show_request(REQUEST | gone | {"divergence": divergence})
    output = capsys.readouterr().out
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
    decisions.show_request(REQUEST | {"divergence": divergence})
    output = capsys.readouterr().out
    assert said in output
    assert unsaid not in output


def test_a_row_says_why_it_missed_or_failed(capsys):
    error = {"status": 400, "cause": "invalid", "error": "prompt [is] too long"}
    decisions.show_requests([REQUEST, REQUEST | error | {"miss": None, "differs_at": None}])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[1].endswith("input_changed: messages[1], character 17")
    assert lines[2].endswith(
        "400     4000    0          0       1010.0 ms   1500.0 ms  invalid: prompt [is] too long"
    )


def test_changed_prompts_are_marked_and_remedies_named(capsys):
    hit = {"miss": "hit", "differs_at": None, "normalised": ["paths", "dates"]}
    decisions.show_requests([REQUEST, REQUEST | hit, REQUEST])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[2].endswith(" ms  hit *")
    assert lines[4:] == ["* kvpin changed the prompt: dates, paths", "input_changed: only append messages"]


@pytest.mark.parametrize(
    ("transfer", "engine", "why"),
    [
        ("moved", "p → d", ""),
        ("failed", "d", "no KV from p: failed; "),
        ("late", "d", "no KV from p: late; "),
    ],
)
def test_a_row_says_which_engine_computed_the_prompt_or_did_not(capsys, transfer, engine, why):
    decisions.show_requests([REQUEST | {"engine": "d", "prefilled_by": "p", "transfer": transfer}])
    row = " ".join(capsys.readouterr().out.splitlines()[1].split())
    assert row.startswith(f"08:00:00 r[1] acme qwen /v1/chat/completions {engine} 200 ")
    assert f" ms {why}input_changed" in row


def test_a_row_says_how_long_it_was_queued(capsys):
    refused = REQUEST | {"cause": "overloaded", "error": "all engines are busy", "queued_s": 0.04}
    decisions.show_requests([REQUEST | {"queued_s": 3.21}, refused])
    output = capsys.readouterr().out
    assert "queued 3.2 s; input_changed" in output
    assert "queued 0.0 s; overloaded: all engines are busy" in output


def test_a_prediction_that_is_not_firm_is_marked(capsys):
    decisions.show_requests([REQUEST | {"predicted_tokens": 2416, "is_firm": False}])
    assert " ~2416 " in capsys.readouterr().out
    decisions.show_route(ROUTE | {"is_firm": False})
    said = "tensorrt_llm-12 may reuse another number of tokens: its prediction is not firm\n"
    assert said in capsys.readouterr().out


def test_a_list_says_where_the_records_of_requests_are_that_were_passed_on(capsys):
    decisions.show_list({"requests": [], "passed_on": {"vm:7": 3}})
    assert "3 requests were answered by the kvpin vm:7, which has their records\n" in capsys.readouterr().out


def test_a_pair_is_shown_by_its_two_engines(capsys):
    pair = cost("d", prefiller="p", transfer_s=0.05, stall_s=0.0, total_s=2.0)
    alone = cost("d", transfer_s=0.0, stall_s=0.5, total_s=4.0)
    decisions.show_route(ROUTE | {"engine": "d", "candidates": [alone, pair]})
    output = capsys.readouterr().out
    assert "stall: streams and requests that its prefill delays" in output
    header, first, second = [line.split() for line in output.splitlines()][-6:-3]
    assert "transfer" in header
    assert "stall" in header
    assert first[:4] == ["p", "→", "d", "0"]
    assert second[:2] == ["d", "0"]
