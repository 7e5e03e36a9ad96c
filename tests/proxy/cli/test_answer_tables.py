import pytest

from proxy.cli import answer_tables

OPERATION = {
    "engines": [
        {
            "engine": "e0",
            "verb": "flush",
            "state": "failed",
            "done": 1,
            "total": 3,
            "bytes": 64,
            "left": {"in_use": 2, "pinned": 0},
            "error": "gone [x]",
        }
    ],
    "result": {"pin_id": "pin-1"},
    "note": "a [note]",
}


def test_the_use_of_tenants(capsys):
    row = {"day": "2027-01-31", "tenant": None, "model": "m[x]", "requests": 3, "failed": 1}
    tokens = {"prompt_tokens": 1234567, "cached_tokens": 1000000, "output_tokens": 99}
    answer_tables.show_usage({"usage": [row | tokens]})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["2027-01-31", "–", "m[x]", "3", "1", "1234567", "1000000", "99"]


def test_engines_that_were_removed_are_listed(capsys):
    named = {
        "engine": "http://gpu1:8000",
        "removed": "2027-01-31T09:05:07Z",
        "named": True,
        "undo": "kvpin engines add vllm=http://gpu1:8000",
    }
    other = {
        **named,
        "engine": "http://127.0.0.1:1 on h",
        "named": False,
        "undo": "kvpin engines add KIND=URL",
    }
    answer_tables.show_engines({"engines": [], "removed": [named, other]})
    *_, first, second = capsys.readouterr().out.splitlines()
    assert first == (
        "removed 2027-01-31 09:05 UTC: http://gpu1:8000; settings name it; "
        "undo: kvpin engines add vllm=http://gpu1:8000"
    )
    assert second == (
        "removed 2027-01-31 09:05 UTC: http://127.0.0.1:1 on h; nothing names it any more, so an undo "
        "needs its settings; undo: kvpin engines add KIND=URL"
    )


def test_the_role_of_an_engine_stands_beside_its_state(capsys):
    engine = {
        "id": "e0", "kind": "vllm", "url": "http://a", "state": "ready", "model": "m", "model_state": None,
        "trust": "precise", "in_flight": 0, "served": 0, "failed": 0, "last_error": None,
    }  # fmt: skip
    answer_tables.show_engines({"engines": [engine | {"role": "prefill", "prefilled": 3}]})
    output = capsys.readouterr().out
    assert "ready, prefill" in output
    assert "0, 3 for others" in output
    answer_tables.show_engines({"engines": [engine | {"role": "both"}]})
    assert "both" not in capsys.readouterr().out


def test_an_operation_shows_what_was_left_and_why(capsys):
    answer_tables.show_operation(OPERATION)
    output = capsys.readouterr().out
    for text in ("e0", "1 of 3", "2 in_use", "gone [x]", "pin_id: pin-1", "a [note]"):
        assert text in output
    assert "pinned" not in output


def test_an_operation_without_engines_shows_its_note_alone(capsys):
    answer_tables.show_operation({"engines": [], "result": {}, "note": "nothing to do"})
    assert capsys.readouterr().out == "nothing to do\n"


def test_slots_and_files_are_shown_where_an_engine_has_them(capsys):
    slots = [
        {"id": 0, "tokens": 812, "unknown": 3, "saved": 700, "operation": "save", "pinned_s": 0.0},
        {"id": 1, "tokens": 0, "unknown": 0, "saved": 0, "operation": None, "pinned_s": 59.6},
    ]
    files = {"tiers": {"host": {"entries": 5, "bytes": 3 << 20, "cap": 64 << 20}}}
    files["tiers"]["host"] |= {"place": "/mem/[kv]", "in_memory": True}
    unchecked = {"ended early": 2, "reuse off": 40}
    engine = {
        "id": "llama-0", "state": "ready", "trust": "precise", "why": "w", "in_flight": 0, "served": 1,
        "failed": 2,
        "audit": {"exact": 1, "checked": 1, "cached_tokens": 119_008, "unchecked": unchecked},
        "blocks": {"gpu": 50, "host": 43, "disk": 0},
        "kv": {"slots": slots, "files": files}, "findings": ["-kvu is on [x]"],
    }  # fmt: skip
    pool = {"model": "m", "index_entries": 1, "tokens_per_block": 16, "engines": [engine]}
    pool["tokenisation"] = {"detail": "tokenised [here]", "forms": {"plain": {"source": "local"}}}
    totals = {"ready": 1, "elsewhere": 0, "engines": 1, "in_flight": 0, "served": 1, "failed": 2}
    answer_tables.show_stats(
        {"pools": [pool], "unconnected": [], "pins": [], "totals": totals, "reuse": True, "exchange": None}
    )
    output = capsys.readouterr().out
    for text in (
        "119008 tokens",
        "1, 2 failed",
        "0 requests in flight, 1 served, 2 failed; reuse is on",
        "llama-0: exact 1 of 1 checked; 42 not checked (reuse off: 40, ended early: 2)\n",
        "slots of llama-0",
        "812",
        "700",
        "save",
        "60 s",
        "5 files on host, 3 of 64 MiB, in /mem/[kv] (memory: a reboot loses them)\n",
        "on [x]",
        "[here]",
        "made here: plain",
    ):
        assert text in output


def test_an_engine_that_another_kvpin_uses_for_this_one_is_not_lost(capsys):
    engine = {"id": "llama-0", "state": "elsewhere", "owner": "vm:7", "last_error": None}
    lost = {
        "id": "llama-1", "kind": "llama_server", "url": "http://b", "state": "down", "model": None,
        "trust": "lost", "in_flight": 0, "served": 0, "failed": 0, "last_error": "gone", "owner": None,
    }  # fmt: skip
    totals = {"ready": 0, "elsewhere": 1, "engines": 2, "in_flight": 0, "served": 0, "failed": 0}
    told = {"pools": [], "pins": [], "totals": totals, "reuse": True, "exchange": None}
    answer_tables.show_stats(told | {"unconnected": [engine], "passed_on": {"vm:7": 3}})
    output = capsys.readouterr().out
    assert "llama-0: used through the kvpin vm:7, which answers its requests: 3 so far\n" in output
    assert "0 of 2 engines ready and 1 used through another kvpin" in output
    assert "not connected" not in output
    answer_tables.show_stats(told | {"unconnected": [engine, lost], "passed_on": {}})
    output = capsys.readouterr().out
    assert "0 so far" in output
    assert "gone" in output.partition("not connected:")[2]


@pytest.mark.parametrize("terminal", [True, False])
def test_the_bar_follows_each_engine(monkeypatch, capsys, terminal):
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm")
    with answer_tables.progress_bar("flush") as show:
        show(OPERATION)
        show({"engines": [OPERATION["engines"][0] | {"done": 3, "total": 3}]})
    streams = capsys.readouterr()
    assert streams.out == ""
    assert ("flush e0" in streams.err) == terminal


@pytest.mark.parametrize(
    ("needed", "in_settings", "said"),
    [
        (False, 0, "no key was issued, and requests need none; `kvpin keys add` issues the first one"),
        (True, 2, "no issued key; keys in the settings: 2"),
        (True, 0, "no key is left: kvpin refuses every request; `kvpin keys add` issues a key"),
    ],
)
def test_without_issued_keys_it_is_said_what_requests_need(capsys, needed, in_settings, said):
    answer_tables.show_keys({"keys": [], "needed": needed, "in_settings": in_settings})
    assert " ".join(capsys.readouterr().out.split()) == said


def test_keys_show_whose_they_are_and_never_a_secret(capsys):
    plain = {
        "name": "",
        "tenant": "acme",
        "ending": "wxyz",
        "created": "2026-11-27T10:00:00Z",
        "expired": False,
    }
    keys = [
        {"id": "key-1", **plain, "models": None, "expires": None},
        {"id": "key-2", **plain, "models": ["m", "[fast]"], "expires": "2027-01-31T00:00:00Z"},
        {"id": "key-3", **plain, "models": None, "expires": "2020-01-31T00:00:00Z", "expired": True},
    ]
    answer_tables.show_keys({"keys": keys, "needed": True, "in_settings": 0})
    first, second, third = capsys.readouterr().out.splitlines()[1:]
    assert first.split() == ["key-1", "acme", "…wxyz", "all", "never", "2026-11-27", "10:00"]
    assert "m, [fast]  2027-01-31 00:00" in second
    assert "expired" in third
