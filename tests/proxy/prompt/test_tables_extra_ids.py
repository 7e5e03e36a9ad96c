"""The worked example of cache identity, and the rules around it."""

from array import array

import numpy as np
import pytest
from safetensors.numpy import save

from engine_adapter import PromptTableError
from proxy.errors import BadRequest
from proxy.prompt import PromptTables
from proxy.prompt.render import CompletionInput

VOCAB = 100
FAKE = [100, 101, 102, 103]


@pytest.fixture
def tables():
    tables = PromptTables()
    tables.put(save({"t": np.ones((4, 8), np.float32)}), table_id="one", extra_id=1)
    tables.put(save({"t": np.zeros((4, 8), np.float32)}), table_id="two", extra_id=2)
    return tables


def resolve(tables, ids, explicit=None, table=None):
    ids = array("i", ids)
    source = CompletionInput(ids, add_special_tokens=True, explicit=explicit, table=table)
    return tables.extra_ids(ids, source, VOCAB)


def test_the_worked_example(tables):
    one = resolve(tables, [*FAKE, 1, 2, 3, 4], [1, 1, 1, 1, 0, 0, 0, 0])
    two = resolve(tables, [*FAKE, 1, 2, 3, 4], [2, 2, 2, 2, 0, 0, 0, 0])
    three = resolve(tables, [*FAKE, 5, 6, 7, 8], [1, 1, 1, 1, 0, 0, 0, 0])
    assert one == three == array("Q", [1, 1, 1, 1, 0, 0, 0, 0])
    assert two == array("Q", [2, 2, 2, 2, 0, 0, 0, 0])


def test_a_named_table_gives_its_extra_id(tables):
    assert resolve(tables, [*FAKE, 1], table="two") == array("Q", [2, 2, 2, 2, 0])
    with_labels = resolve(tables, [*FAKE, 1], [9, 9, 9, 9, 0], table="two")
    other = resolve(tables, [*FAKE, 1], [9, 9, 9, 9, 0], table="one")
    assert with_labels != other


def test_text_has_none(tables):
    assert resolve(tables, [1, 2]) is None
    assert resolve(tables, [1, 2], [0, 0], table="one") is None


@pytest.mark.parametrize(
    ("ids", "explicit", "table", "error", "param"),
    [
        (FAKE, None, "three", BadRequest, "prompt_table"),
        (FAKE, None, None, PromptTableError, "prompt[0]"),
        (FAKE, [1, 1, 1], None, PromptTableError, "extra_ids"),
        (FAKE, [1, 0, 1, 1], None, PromptTableError, "extra_ids[1]"),
        (FAKE, [1, 1, 3, 1], None, PromptTableError, "extra_ids[2]"),
        ([1], [1], None, PromptTableError, "extra_ids[0]"),
        ([1], [2**64], None, PromptTableError, "extra_ids[0]"),
        ([104], None, "one", PromptTableError, "prompt[0]"),
    ],
)
def test_what_breaks_a_rule_names_its_index(tables, ids, explicit, table, error, param):
    with pytest.raises(error) as caught:
        resolve(tables, ids, explicit, table)
    assert caught.value.param == param
