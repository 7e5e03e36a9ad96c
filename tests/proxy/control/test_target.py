import pytest

from proxy.control.operations import Target, kind_of
from proxy.errors import BadRequest


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "target"),
        ({"model": "m", "cache_salt": "s"}, "target"),
        ({"messages": [], "prompt": "x"}, "prompt"),
        ({"prompt": "x", "all": True}, "all"),
        ({"all": True, "engine": "a"}, "all"),
        ({"all": True, "tenant": "t"}, "all"),
        ({"prompt": "x", "tools": []}, "tools"),
        ({"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"messages": [], "extra_ids": [1]}, "extra_ids"),
        ({"messages": [], "prompt_table": "t"}, "prompt_table"),
        ({"token_ids": [1], "add_special_tokens": False}, "add_special_tokens"),
        ({"prompt_cache_key": "k", "cache_salt": "s"}, "cache_salt"),
        ({"request_id": "r", "cache_salt": "s"}, "cache_salt"),
        ({"prompt": "x", "tokens": 3}, "tokens"),
    ],
)
def test_a_wrong_target_names_its_field(fields, param):
    with pytest.raises(BadRequest) as caught:
        kind_of(Target(**fields))
    assert caught.value.param == param
