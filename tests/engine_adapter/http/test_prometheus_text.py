import time
import timeit

import pytest

from engine_adapter.errors import EngineUnavailable
from engine_adapter.http.control import read_samples

PAGE = b"""\
# HELP busy:requests Requests now.
# TYPE busy:requests gauge
busy:requests{engine="0",model="a b"} 3.0
busy:requests{engine="1",model="a b"} 4
busy:requests_total{engine="0"} 99.0
# TYPE config_info gauge
config_info{engine="0",note="a \\"quoted\\", thing",size="32"} 1.0
started_seconds 1.795250395377022e+09
broken_lines_of_others{ nan nan
"""


def test_the_samples_that_were_asked_for():
    samples = read_samples(PAGE, ("busy:requests", "config_info", "started_seconds", "absent"))
    assert samples.sum("busy:requests") == 7
    assert samples.sum("busy:requests", engine="1") == 4
    assert samples.sum("busy:requests", engine="2") is None
    assert samples.sum("started_seconds") == 1795250395.377022
    assert samples.labels("config_info") == {"engine": "0", "note": 'a "quoted", thing', "size": "32"}
    assert samples.labels("config_info", engine="1") == {}
    assert (samples.all("absent"), samples.all("busy:requests_total")) == ([], [])


@pytest.mark.parametrize("page", [b"\xff\xfe", b'started{engine="0" 1\n', b"started one\n"])
def test_a_page_of_another_kind(page):
    if page.startswith(b"\xff"):
        page = b"started " + page
    with pytest.raises(EngineUnavailable, match="/metrics cannot be read"):
        read_samples(page, ("started",))


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_sample_with_its_time_and_one_at_the_end(end):
    samples = read_samples(f'a{{note="}} 1"}} 2 1395066363000\nb 3{end}'.encode(), ("a", "b"))
    assert [each[:3] for each in samples.all("a")] == [("a", {"note": "} 1"}, 2.0)]
    assert samples.sum("b") == 3


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "1e999"])
def test_values_that_are_no_numbers_tell_nothing(value):
    samples = read_samples(f'a{{x="1"}} {value}\na{{x="2"}} 3\nb {value}\n'.encode(), ("a", "b"))
    assert (samples.sum("a"), samples.sum("b")) == (3, None)


def test_the_same_series_with_other_values():
    first, second = (read_samples(b'a{x="1"} %d\na{x="2"} 5\n' % value, ("a",)) for value in (1, 2))
    assert (first.sum("a"), second.sum("a"), second.sum("a", x="1")) == (6, 7, 2)


def test_a_large_page_costs_little_more_than_a_small_one():
    """It is read each second for each engine: only lines of the requested metrics may be looked at."""
    others = b"".join(b'other_%d{le="0.5",engine="0"} 1.0\n' % n for n in range(3000))

    def cpu_s(page):
        spent = []
        for _ in range(20):
            begun = time.thread_time()
            read_samples(page, ("busy:requests", "config_info", "started_seconds"))
            spent.append(time.thread_time() - begun)
        return min(spent)

    line_by_line = min(timeit.repeat(lambda: (PAGE + others).decode().splitlines(), number=1, repeat=20))
    assert cpu_s(PAGE + others) - cpu_s(PAGE) < line_by_line
