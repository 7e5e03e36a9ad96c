import json

from proxy.request import records as module
from proxy.request.records import Sources


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
