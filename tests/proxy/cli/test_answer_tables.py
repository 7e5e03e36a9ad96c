from proxy.cli import answer_tables


def test_the_use_of_tenants(capsys):
    row = {"day": "2027-01-31", "tenant": None, "model": "m[x]", "requests": 3, "failed": 1}
    tokens = {"prompt_tokens": 1234567, "cached_tokens": 1000000, "output_tokens": 99}
    answer_tables.show_usage({"usage": [row | tokens, row | tokens | {"tenant": "acme", "model": None}]})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["2027-01-31", "–", "m[x]", "3", "1", "1234567", "1000000", "99"]
    assert lines[2][:3] == ["2027-01-31", "acme", "–"]


def test_engines_that_were_removed_are_listed(capsys):
    at = {"removed": "2027-01-31T09:05:07Z"}
    named = at | {"engine": "http://gpu1:8000", "named": True}
    named["undo"] = "kvpin engines add vllm=http://gpu1:8000"
    other = at | {"engine": "http://127.0.0.1:1 on h", "named": False, "undo": "kvpin engines add KIND=URL"}
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
        "119008 tokens", "1, 2 errors", "0 requests in flight, 1 served, 2 errors; reuse is on",
        "llama-0: exact 1 of 1 checked; 42 not checked (reuse off: 40, ended early: 2)\n",
        "slots of llama-0", "812", "700", "save", "60 s", "on [x]", "[here]", "made here: plain",
        "5 files on host, 3 of 64 MiB, in /mem/[kv] (memory: a reboot loses them)\n",
    ):  # fmt: skip
        assert text in output


def test_keys_show_whose_they_are_and_never_a_secret(capsys):
    plain = {"id": "key-1", "name": "", "tenant": "acme", "ending": "wxyz", "models": None}
    plain |= {"created": "2026-11-27T10:00:00Z", "expires": None, "expired": False}
    keys = [
        plain,
        plain | {"id": "key-2", "models": ["m", "[fast]"], "expires": "2027-01-31T00:00:00Z"},
        plain | {"id": "key-3", "expires": "2020-01-31T00:00:00Z", "expired": True},
    ]
    answer_tables.show_keys({"keys": keys, "needed": True, "in_settings": 0})
    first, second, third = capsys.readouterr().out.splitlines()[1:]
    assert first.split() == ["key-1", "acme", "…wxyz", "all", "never", "2026-11-27", "10:00"]
    assert "m, [fast]  2027-01-31 00:00" in second
    assert "expired" in third
