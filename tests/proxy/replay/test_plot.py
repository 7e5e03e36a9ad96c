from proxy.replay.report import draw, rows
from proxy.replay.simulator import ReplayRun, run_all
from tests.proxy.replay.making import ask, model_of, trace_of


def test_a_picture(tmp_path):
    trace = trace_of(*(ask((n % 3, 10 + n), at=n / 10) for n in range(10)))
    sizes = model_of(5), model_of(9)
    names = "kvpin", "sticky", "oracle"
    runs = [ReplayRun(name, n, model) for n in (1, 2) for model in sizes for name in names]
    draw(tmp_path / "p.png", rows(run_all(trace, runs)), "a title")
    picture = (tmp_path / "p.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n")
    assert int.from_bytes(picture[16:20], "big") > 1000
