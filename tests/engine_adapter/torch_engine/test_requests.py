from __future__ import annotations

import subprocess
import sys

import pytest

from engine_adapter.torch_engine.requests import Finished, RequestRefused, Scheduled, Token


def test_outputs_are_frozen_values():
    assert Token(5) == Token(5, None, None)
    assert Scheduled(4) != Scheduled(8)
    with pytest.raises(AttributeError):
        Finished("stop").reason = "length"


def test_a_refusal_names_its_field():
    assert RequestRefused("too long", param="prompt").param == "prompt"


def test_the_interface_and_the_cache_need_no_torch():
    code = (
        "import sys; import engine_adapter.torch_engine.requests, engine_adapter.torch_engine.options, "
        "engine_adapter.torch_engine.kv_cache; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
