from pathlib import Path

import pytest

from proxy.settings import EngineSettings, Settings, TlsSettings, engine_changes, needs_restart


def engines(*urls, **more):
    """Engines that are numbered, as the settings number them."""
    listed = [EngineSettings(kind="vllm", url=f"http://{url}", **more) for url in urls]
    return Settings(engines=listed).engines


def by_id(entries):
    return {entry.id: entry for entry in entries}


def test_what_joins_leaves_and_changes():
    have = by_id(Settings(engines=[{"kind": "vllm", "url": f"http://{n}", "id": n} for n in "abc"]).engines)
    want = [{"kind": "vllm", "url": "http://a", "id": "a"}, {"kind": "vllm", "url": "http://x", "id": "b"}]
    want.append({"kind": "vllm", "url": "http://d", "id": "d"})
    changes = engine_changes(have, Settings(engines=want).engines)
    assert [entry.id for entry in changes.added] == ["d"]
    assert changes.removed == ("c",)
    assert [entry.url for entry in changes.changed] == ["http://x"]


@pytest.mark.parametrize(
    ("now", "added", "removed"),
    [
        (("b", "c"), [], ("vllm-0",)),
        (("c", "a", "b"), [], ()),
        (("n", "a", "b", "c"), ["vllm-3"], ()),
        (("b", "n"), ["vllm-3"], ("vllm-0", "vllm-2")),
    ],
)
def test_an_engine_without_an_id_keeps_its_number_when_others_come_and_go(now, added, removed):
    changes = engine_changes(by_id(engines("a", "b", "c")), engines(*now))
    assert ([entry.id for entry in changes.added], changes.removed, changes.changed) == (added, removed, ())


def test_a_new_secret_is_a_change_and_the_ids_are_the_first_free_ones():
    have = by_id(engines("a", api_key="old"))
    changes = engine_changes(have, engines("a", api_key="new"))
    assert [entry.id for entry in (*changes.added, *changes.changed)] == ["vllm-0"]


def test_what_counts_only_after_a_restart_is_named():
    old = Settings(retries=1, port=1)
    assert needs_restart(old, Settings(retries=2, port=2, reuse=True)) == ["port", "reuse"]
    times = {"first_byte_s": 1, "idle_s": 1, "total_s": 1}
    assert needs_restart(old, Settings(retries=1, port=1, timeouts=times)) == []
    assert needs_restart(old, Settings(port=1, timeouts={"connect_s": 1})) == ["timeouts.connect_s"]
    tls, renewed, strict = (
        Settings(tls=TlsSettings(cert=Path(cert), client_ca=ca and Path(ca)))
        for cert, ca in (("a", None), ("b", None), ("b", "ca"))
    )
    assert needs_restart(Settings(), tls) == ["tls"]
    assert needs_restart(tls, renewed) == []
    assert needs_restart(renewed, strict) == ["tls"]
