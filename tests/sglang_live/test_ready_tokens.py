"""Chats that kvpin sends as token ids to a real SGLang are answered as those that it gets as messages."""

from __future__ import annotations

import pytest

from tests.live.ready_chats import COUNT, different, thinking_model
from tests.sglang_live.sglang_world import SglangOptions, sglang_world

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]

FLAGS = ("--enable-cache-report", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")


def test_equal_answers(tmp_path, tell):
    options = SglangOptions(tokens=20_000, model=thinking_model(tmp_path / "model"), flags=FLAGS)
    with sglang_world(tmp_path, options) as world:
        differing, had = different(world, lambda pattern: {"regex": pattern})
    tell(f"{COUNT - len(differing)} of {COUNT} equal; answers had {dict(had)}")
    assert not differing, "\n".join(differing)
