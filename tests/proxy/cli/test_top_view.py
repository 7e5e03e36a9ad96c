from rich.console import Console

from proxy.cli.decisions import TopView

COUNTS = ("prompt_tokens", "available_tokens", "selected_tokens", "delivered_tokens", "saved_s")
REUSE = dict.fromkeys(COUNTS, 0)


def engine(name, **fields):
    return {
        "id": name, "model": "m", "state": "ready", "trust": "precise", "queue_s": 0.25, "in_flight": 3,
        "held_tokens": {"gpu": 800, "host": 16}, "capacity_tokens": {"gpu": 1600}, "reuse": REUSE,
        "problem": None, **fields,
    }  # fmt: skip


def snapshot(at, requests, engines, **reuse):
    return {
        "at": at, "reuse_on": True, "requests": requests, "waiting": {"m": 2},
        "reuse": {**REUSE, **reuse}, "engines": engines,
    }  # fmt: skip


def request(name, **fields):
    return {
        "request_id": name, "started": 0.0, "engine": "e0", "status": None, "n_tokens": 50,
        "available_tokens": 48, "predicted_tokens": 32, "is_firm": True, "reported_tokens": None,
        "first_byte_s": None,
        "why": "the only one", **fields,
    }  # fmt: skip


def drawn(view, width=160, height=None):
    console = Console(width=width, height=height or 40, file=None, record=True, highlight=False)
    with console.capture() as capture:
        console.print(view, height=height)
    return capture.get()


def test_rates_are_those_of_the_last_seconds():
    view = TopView("http://k")
    for at in range(21):
        reuse = {"prompt_tokens": 100 * at, "available_tokens": 80 * at, "delivered_tokens": 60 * at}
        view.take("snapshot", snapshot(at, 5 * at, [engine("e0"), engine("e1", state="down")], **reuse))
    text = drawn(view)
    assert "\ne0 " in text
    assert "\ne1 " in text
    assert "1 of 2 engines ready · 5.0 requests/s · 2 waiting" in text
    assert "of prompt tokens 80% available, 60% reused" in text
    assert "800 50%" in text
    view.take("snapshot", snapshot(22, 0, []))  # kvpin was restarted
    assert "0 of 0 engines ready · 2 waiting" in drawn(view)


def test_a_request_keeps_its_reason_and_its_place():
    view = TopView("http://k")
    view.take("snapshot", snapshot(0, 0, [engine("e0")]))
    view.take("placed", request("a"))
    view.take("placed", request("b", why="another"))
    view.take("finished", request("a", status=200, reported_tokens=32, first_byte_s=0.012, why=None))
    lines = drawn(view).splitlines()
    assert " ".join(lines[-2].split()[1:]) == "e0 200 50 48 32 32 12 ms the only one"
    view.take("finished", request("a", status=200, is_firm=False))
    assert " ~32 " in drawn(view)
    assert "another" in lines[-1]
    assert " … " in lines[-1]


def test_it_fits_a_small_terminal_and_many_engines():
    view = TopView("http://k")
    view.take("snapshot", snapshot(0, 0, [engine(f"engine-{n}") for n in range(256)]))
    for n in range(500):
        view.take("placed", request(str(n)))
    lines = drawn(view, width=60, height=24).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 60
    assert any("more engines" in line for line in lines)
