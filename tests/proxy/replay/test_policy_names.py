import pytest

from proxy.replay.rules import UnknownPolicy, resolve


def test_an_unknown_name_is_told_with_those_there_are():
    with pytest.raises(UnknownPolicy, match=r"no policy 'x'; there are all, ablations, kvpin, .*oracle"):
        resolve(["kvpin", "x"])
