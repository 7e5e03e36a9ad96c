import pytest
from pydantic import ValidationError

from proxy.settings import Settings
from proxy.settings.fields import details_of, plain_message


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"exchange": "unix:/x"}, "it must be a table of settings, not a single value"),
        ({"engines": [{"kind": "vllm"}]}, "it is missing"),
        ({"engines": 3}, "it must be a list"),
        ({"port": "x"}, "it must be a whole number"),
        ({"drain_s": "x"}, "it must be a number"),
        ({"health": {"interval_s": 0}}, "it must be above 0"),
        ({"port": 65536}, "it must be at most 65535"),
        ({"reuse": "perhaps"}, "it must be true or false"),
        ({"limits": {"body_bytes": "many"}}, "it must be a number of bytes, or one with a unit such as 4GiB"),
        (
            {"limits": {"body_bytes": "64MB!"}},
            "it must be a number of bytes, or one with a unit such as 4GiB",
        ),
        ({"logs": {"format": "x"}}, "it must be 'auto', 'json' or 'pretty'"),
        ({"managed": [{"kind": "embedded", "id": "a b"}]}, "it must have 1 to 64 letters, digits, "),
        ({"name": "a b"}, "it must have 1 to 64 characters of ASCII, without spaces"),
        ({"engines": [{"kind": "vlm", "url": "http://x"}]}, "unknown engine kind 'vlm'"),
    ],
)
def test_a_wrong_value_in_plain_english(values, said):
    with pytest.raises(ValidationError) as caught:
        Settings(**values)
    (error,) = details_of(caught.value)
    assert plain_message(error).startswith(said)
