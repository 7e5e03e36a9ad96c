"""What an engine says of its models."""

import pytest

from engine_adapter.errors import EngineUnavailable
from engine_adapter.http.adapter import read_models

FIRST = {"id": "m", "object": "model", "created": 5, "owned_by": "vllm", "root": "/x", "max_model_len": 9}
OTHER = {"id": "other", "parent": None, "permission": [{}], "meta": {"n_ctx": 3}}
LORA = {"id": "ada", "root": "/y", "parent": "m"}


@pytest.mark.parametrize("data", [None, [], [{}], ["m"], [{"id": 5}], [LORA]])
def test_models_without_a_name(data):
    for answer in ({"data": data}, data):
        with pytest.raises(EngineUnavailable, match="/v1/models names no model"):
            read_models(answer)


def test_the_first_base_model():
    model = read_models({"data": [LORA, FIRST, OTHER]})
    assert (model.name, model.max_model_len, model.root, model.loras) == ("m", 9, "/x", {"ada"})
    assert model.card == {"max_model_len": 9}


def test_the_model_that_the_operator_wants():
    answer = {"data": [FIRST, OTHER]}
    model = read_models(answer, "other")
    assert (model.name, model.max_model_len, model.root, model.loras) == ("other", None, None, frozenset())
    assert model.card == {"meta": {"n_ctx": 3}}
    assert read_models(answer, "alias") == read_models(answer) == read_models(answer, "m")


def test_fields_of_another_type_count_as_missing():
    model = read_models({"data": [{"id": "m", "max_model_len": "9", "root": 5}]})
    assert (model.max_model_len, model.root) == (None, None)
