"""Each cell of the client matrix: a feature of a client on an engine.

`scripts/test-clients` runs all cells, a plain test run those of the small matrix.
"""

from __future__ import annotations

import os

import pytest

from tests.clients.matrix import FEATURES, cells

CELLS = [pytest.param(*cell, id="-".join(cell)) for cell in cells(small="ALL_CLIENTS" not in os.environ)]


@pytest.mark.live
@pytest.mark.timeout(
    600
)  # the first cell of an engine waits for its start, that of a client for node or Python
@pytest.mark.parametrize(("client", "engine", "feature"), CELLS)
def test_cell(run_of, client, engine, feature):
    result = run_of(client, engine).result(feature)
    refusal = FEATURES[feature].refused.get(engine)
    if refusal is None and "error" in result:
        pytest.fail(f"{result['error']}\n{result['where']}", pytrace=False)
    if refusal is not None and result.get("status") != refusal.status:
        pytest.fail(f"{refusal.status} was expected: {result}", pytrace=False)
