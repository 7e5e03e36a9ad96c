from engine_adapter.llama_server.options import LlamaServerOptions
from engine_adapter.options import read_options


def test_sizes_have_units():
    options = read_options("llama_server", LlamaServerOptions, {"host_cache_bytes": "4GiB"})
    assert options.host_cache_bytes == 4 * 2**30
