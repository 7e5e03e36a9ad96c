"""Each cell of the client matrix: a feature of a client on an engine."""

from __future__ import annotations

import os

import pytest

from tests.clients.matrix import CLIENTS, FEATURES

CELLS = [
    pytest.param(client, engine, feature, id=f"{client}-{engine}-{feature}")
    for client, of_client in CLIENTS.items()
    for engine in ("embedded", "llama-server", "fake")
    for feature in of_client.features
    if engine in FEATURES[feature].engines
]


@pytest.mark.live
@pytest.mark.parametrize(("client", "engine", "feature"), CELLS)
def test_cell(run_of, client, engine, feature):
    result = run_of(client, engine).result(feature)
    refusal = FEATURES[feature].refusal(engine)
    if refusal is None and "error" in result:
        pytest.fail(f"{result['error']}\n{result['where']}", pytrace=False)
    if refusal is not None and result.get("status") != refusal:
        pytest.fail(f"expected status {refusal}: {result}", pytrace=False)
