import os

import pytest


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """Settings read the process's environment: start each test from none of ours."""
    for name in list(os.environ):
        if name.upper().startswith("KVPIN_") or name.endswith("ENABLE_KV_CACHE_REUSE"):
            monkeypatch.delenv(name)
