"""What `kvpin engine` does with signals, parents and broken devices is in test_serve.py."""

import socket

import pytest

from engine_adapter import EngineUnavailable
from engine_adapter.torch_engine.options import EmbeddedOptions
from engine_adapter.torch_engine.process import serve_engine


def test_a_port_in_use_is_named_and_may_be_free_later():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EngineUnavailable, match=str(port)):
            serve_engine(EmbeddedOptions(port=port))
