"""The tables of what becomes of each part of a request, beside the types that clients know."""

import importlib.util
import json
from pathlib import Path

import pytest

from proxy.request.translate.fates import (
    MESSAGE_BLOCKS,
    MESSAGE_FIELDS,
    MESSAGE_TOOLS,
    RESPONSE_FIELDS,
    RESPONSE_ITEMS,
    RESPONSE_TOOLS,
    plain,
    text_of,
)
from scripts.client_types import types_of

ROOT = Path(__file__).parents[4]
TABLES = {
    "anthropic": {
        "tools": MESSAGE_TOOLS, "blocks": MESSAGE_BLOCKS, "results": MESSAGE_BLOCKS, "fields": MESSAGE_FIELDS,
    },
    "openai": {"tools": RESPONSE_TOOLS, "items": RESPONSE_ITEMS, "fields": RESPONSE_FIELDS},
}  # fmt: skip


def without_fate(types, tables):
    return {what: [t for t in types[what] if plain(t) not in rows] for what, rows in tables.items()}


def test_the_installed_package_has_no_type_without_a_fate():
    """`openai` is a test dependency. Only scripts/test-clients has `anthropic`: its list is committed."""
    spec = importlib.util.find_spec("openai")
    assert spec is not None
    assert spec.submodule_search_locations
    types = types_of("openai", Path(spec.submodule_search_locations[0]))
    assert all(len(types[what]) > 10 for what in TABLES["openai"])
    assert without_fate(types, TABLES["openai"]) == {what: [] for what in TABLES["openai"]}


@pytest.mark.parametrize("package", TABLES)
def test_the_committed_list_has_no_type_without_a_fate(package):
    types = json.loads((ROOT / "tests/data/client_types.json").read_text("utf-8"))[package]
    assert without_fate(types, TABLES[package]) == {what: [] for what in TABLES[package]}


def test_texts_of_what_a_service_wrote():
    item = {
        "type": "x",
        "id": "1",
        "content": [{"text": "a", "encrypted_content": "?"}, {"source": {"data": "AA"}}],
    }
    assert text_of(item) == "a"
    assert text_of({"source": {"type": "text", "data": "b"}}) == "b"
    deep = "c"
    for _ in range(99):
        deep = [deep]
    assert text_of({"text": 1, "output": deep}) == ""
