import pytest

from engine_adapter.lmcache.options import LmCacheOptions
from engine_adapter.options import OptionError, read_options


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lmcache": "h:2"}, "lmcache: 'h:2' is not an http:// or https:// address"),
        ({"lmcache_coordinator": "http://h:3"}, "lmcache_coordinator goes with lmcache=http://HOST:PORT"),
    ],
)
def test_addresses_are_checked(values, message):
    with pytest.raises(OptionError, match=message):
        read_options("vllm", LmCacheOptions, values)
