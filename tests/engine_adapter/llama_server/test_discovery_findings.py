"""Findings about servers that are described here; test_discovery.py finds the same of real ones."""

import re
from dataclasses import replace

import pytest

from engine_adapter.llama_server.checkpoints import MemoryRules
from engine_adapter.llama_server.discovery import ServerFacts, findings_of

FACTS = ServerFacts(
    model="m",
    card={},
    slots=4,
    slot_ctx=512,
    train_ctx=2048,
    local_model=None,
    vocab_size=None,
    build="",
    chat_template="",
    instance=None,
    is_sleeping=False,
    has_slots=True,
    can_save=True,
    fingerprint="f",
)


def test_a_server_with_all_flags():
    assert [*findings_of(FACTS)] == []


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        ({"ram_cache": True}, "its RAM cache is on.*--cache-ram 0"),
        ({"is_unified": True}, r"its slots share one KV pool.*-np 4 -c 4\*CTX"),
        (
            {"slot_ctx": 2048, "is_unified": None, "ram_cache": None},
            "not known yet whether its slots share one KV pool.*kvpin doctor --probe finds out",
        ),
        (
            {"slot_ctx": 2048, "is_unified": None, "ram_cache": False},
            r"its slots may share one KV pool.*cannot tell.*--slot-save-path DIR.*-np 4 -c 4\*CTX",
        ),
        ({"can_save": False}, "no prefix can be saved.*--slot-save-path DIR"),
        ({"has_slots": False}, "cannot watch its slots.*--slots"),
        ({"memory": MemoryRules(window=128)}, "sliding windows.*nothing is saved.*--swa-full"),
        ({"has_draft": True}, "draft model.*nothing is saved or restored.*without --model-draft"),
        ({"memory": MemoryRules(is_recurrent=True, most=0)}, "no context checkpoints.*--ctx-checkpoints 32"),
        ({"is_sleeping": True}, "it sleeps when idle.*--sleep-idle-seconds"),
    ],
)
def test_each_missing_flag_is_named(changes, finding):
    (found,) = findings_of(replace(FACTS, **changes))
    assert re.search(finding, str(found))
