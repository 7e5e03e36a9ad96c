import json
from array import array

import pytest

from engine_adapter import Headers, JsonBody
from proxy.prompt import Prompt
from proxy.request import records as module
from proxy.request.calls import Call
from proxy.request.records import RequestRecord, RequestRecords, Sources


def record(name, tokens=None, *, key=None, tenant=None, client_id=None):
    prompt = Prompt(array("i", tokens)) if tokens is not None else None
    fields = {"client_request_id": client_id, "prompt_cache_key": key, "prompt": prompt, "served_as": "m"}
    return RequestRecord(name, 0.0, "/v1/x", "m", tenant, stream=False, **fields)


def log_of(*records, capacity=10):
    log = RequestRecords(capacity)
    for each in records:
        log.add(each)
    return log


def names(log):
    return [each.request_id for each in log]


class TestMemory:
    def test_the_oldest_leave_when_there_are_too_many(self):
        log = log_of(*(record(str(n)) for n in range(5)), capacity=3)
        assert names(log) == ["2", "3", "4"]
        assert log.get("1") is None
        assert log.get("4").request_id == "4"

    def test_the_oldest_leave_when_they_hold_too_many_tokens(self, monkeypatch):
        monkeypatch.setattr(module, "MAX_TOKENS", 10)
        log = log_of(record("a", range(6)), record("b", range(4)), record("c", range(3)))
        assert (names(log), log._tokens) == (["b", "c"], 7)
        log.add(record("huge", range(100)))
        assert (names(log), log._tokens) == (["huge"], 100)
        log.add(record("d"))
        assert (names(log), log._tokens) == (["d"], 0)

    def test_long_texts_of_clients_are_not_kept(self):
        body = JsonBody(b'{"model": "m", "prompt_cache_key": "%b"}' % (b"k" * 2_000))
        made = RequestRecord.of(Call("r", "POST", "/v1/x", Headers([]), body))
        made.error = "no " + "x" * 10_000
        (kept,) = log_of(made)
        assert (len(kept.error), kept.prompt_cache_key) == (2_000, None)


def test_a_clients_id_finds_its_own_newest_request_and_hides_no_other():
    red, blue, again = (
        record(name, client_id="same", tenant=tenant)
        for name, tenant in (("req-1", "red"), ("req-2", "blue"), ("req-3", "red"))
    )
    log = log_of(red, blue, again, record("req-4", client_id="req-1", tenant="blue"))
    assert names(log) == ["req-1", "req-2", "req-3", "req-4"]
    assert (log.get("same", "red"), log.get("same", "blue"), log.get("same")) == (again, blue, again)
    assert (log.get("req-1"), log.get("req-1", "red"), log.get("req-1", "blue")) == (red, red, None)
    assert log.get("other") is None


def test_the_beginning_of_an_id_finds_the_only_request_with_it():
    one, two = record("req-12", tenant="red"), record("req-13", tenant="blue")
    part, last = record("req-2-1", client_id="req-2"), record("req-2-2", client_id="req-2")
    log = log_of(one, two, part, last)
    assert (log.get("req-12"), log.get("req-13"), log.get("req-1", "blue")) == (one, two, two)
    assert (log.get("req-1"), log.get(""), log.get("eq-1")) == (None, None, None)
    assert (log.get("12"), log.get("1", "blue"), log.get("1")) == (one, two, None)
    assert log_of(part, last).get("req-") is last
    assert log.get("req-2-") is None


def test_the_prompt_of_a_cache_key_is_its_tenants_newest():
    own = [record(name, tokens, key="k") for name, tokens in (("a", [1]), ("b", [2]), ("c", None))]
    log = log_of(*own, record("d", [3], key="k", tenant="t"))
    model, prompt = log.last_prompt("k", None)
    assert (model, prompt.token_ids.tolist()) == ("m", [2])
    assert log.last_prompt("k", "t")[1].token_ids.tolist() == [3]
    assert log.last_prompt("k", "other") is None
    assert log.last_prompt("none", None) is None


def test_prompts_do_not_show_in_logs():
    assert "1234567" not in repr(record("a", [1234567]))


def test_an_answer_is_found_by_its_id_or_x_request_id_and_its_tenant():
    """The request's id is kvpin's own, or the client's, which the answer repeats."""
    red, blue = record("req-1", tenant="red", client_id="mine"), record("req-2", tenant="blue")
    red.answer_id = blue.answer_id = "resp_1"
    log = log_of(red, blue)
    assert (log.answered("resp_1", "red"), log.answered("resp_1", "blue")) == (red, blue)
    assert (log.answered("req-1", "red"), log.answered("mine", "red")) == (red, red)
    for name, tenant in (("resp_1", None), ("resp_2", "red"), ("req-1", "blue"), ("req-1", None)):
        assert log.answered(name, tenant) is None


def test_a_body_leaves_with_its_record():
    log = log_of(capacity=1)
    for name in ("a", "b"):
        log.keep_source(record(name), b'{"prompt": "x"}')
        log.add(record(name))
    assert log.sources.fields("a", None) is None
    assert log.sources.fields("b", None) == {"prompt": "x"}


@pytest.mark.parametrize(
    ("log", "runs_prompt"),
    [(RequestRecords(0), True), (RequestRecords(9, keeps_bodies=False), True), (RequestRecords(9), False)],
)
def test_no_body_is_kept_that_nobody_can_ask_about(log, runs_prompt):
    new = record("a")
    new.runs_prompt = runs_prompt
    log.keep_source(new, b"{}")
    assert log.sources.n_bytes == 0


def body(prompt, **more):
    return json.dumps({"prompt": prompt, **more}).encode()


def test_the_fields_that_make_a_prompt():
    sources = Sources()
    sources.keep("r", "red", body("x", temperature=1, tools=[1]))
    assert sources.fields("r", "red") == {"prompt": "x", "tools": [1]}
    assert sources.fields("r", "blue") is sources.fields("r", None) is None
    sources.drop("r", "blue")
    sources.drop("r", "red")
    sources.drop("r", "red")
    assert (sources.fields("r", "red"), sources.n_bytes) == (None, 0)


def test_a_field_that_cannot_be_read_is_none():
    sources = Sources()
    sources.keep("r", None, b'{"prompt": 1e999}')
    assert sources.fields("r", None) == {"prompt": None}


def test_the_tenant_that_takes_most_loses_its_oldest():
    one = len(body("a"))
    sources = Sources(limit_bytes=3 * one)
    sources.keep("b1", "blue", body("b"))
    for name in ("r1", "r2", "r3"):
        sources.keep(name, "red", body("a"))
    assert sources.fields("r1", "red") is None
    assert all(sources.fields(name, "red") for name in ("r2", "r3"))
    assert sources.fields("b1", "blue") == {"prompt": "b"}
    assert sources.n_bytes == 3 * one


def test_large_bodies_are_not_kept(monkeypatch):
    monkeypatch.setattr(module, "MOST_BYTES", 20)
    sources = Sources()
    sources.keep("r", None, body("a" * 20))
    assert sources.n_bytes == 0
