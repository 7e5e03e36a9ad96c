"""Chats that kvpin sends with token ids to a real vLLM are answered as those without."""

from __future__ import annotations

import os

import pytest

from tests.live.ready_chats import COUNT, different, thinking_model
from tests.live.server_world import ROOT
from tests.vllm_live.vllm_world import VllmOptions, vllm_world

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]

FLAGS = (
    *("--enable-scale-out", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *("--reasoning-parser", "qwen3", "--middleware", "tests.vllm_live.ids_seen.IdsSeen"),
)


def test_equal_answers(tmp_path, tell):
    model = thinking_model(tmp_path / "model")
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    options = VllmOptions(blocks=600, model=model, flags=FLAGS, environment={"PYTHONPATH": path})
    with vllm_world(tmp_path, options) as world:
        differing, had = different(world, lambda pattern: {"structured_outputs": {"regex": pattern}})
        with_ids = world.servers[0].log.read_text().count("a chat with token ids")
    tell(f"{COUNT - len(differing)} of {COUNT} equal, {with_ids} with ids; answers had {dict(had)}")
    assert not differing, "\n".join(differing)
    assert with_ids >= COUNT * 0.95
