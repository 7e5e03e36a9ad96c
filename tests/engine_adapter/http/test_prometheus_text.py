import pytest

from engine_adapter.errors import EngineUnavailable
from engine_adapter.http.prometheus_text import read_samples

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


def test_a_page_without_any():
    assert read_samples(b"", ("started",)).sum("started") is None
