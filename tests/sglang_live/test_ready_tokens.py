"""Chats that kvpin sends as token ids to a real SGLang are answered as those that it gets as messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.live.ready_chats import COUNT, different, thinking_model
from tests.sglang_live.sglang_world import SglangOptions, sglang_world

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]

FLAGS = ("--enable-cache-report", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
IDS_SEEN = {"PYTHONPATH": str(Path(__file__).parent / "ids_seen")}


def test_equal_answers(tmp_path, tell):
    model = thinking_model(tmp_path / "model")
    options = SglangOptions(tokens=20_000, model=model, flags=FLAGS, environment=IDS_SEEN)
    with sglang_world(tmp_path, options) as world:
        differing, had = different(world, lambda pattern: {"regex": pattern})
        with_ids = world.servers[0].log.read_text().count("a chat with token ids")
    tell(f"{COUNT - len(differing)} of {COUNT} equal, {with_ids} with ids; answers had {dict(had)}")
    assert not differing, "\n".join(differing)
    assert with_ids >= COUNT * 0.95
