from datetime import datetime
from typing import Annotated

import msgspec
import pytest

from engine_adapter import plain_error


@pytest.mark.parametrize(
    ("meta", "kind", "value", "said"),
    [
        ({}, int | None, "x", "must be a whole number - at `$.value`"),
        ({"gt": 0.0}, float, 0.0, "must be a number above 0 - at `$.value`"),
        ({"ge": 0.5}, float, 0.0, "must be a number of at least 0.5 - at `$.value`"),
        ({"max_length": 2}, str, "abc", "must be text with a length of at most 2 - at `$.value`"),
        ({}, list[str], 1, "must be a list - at `$.value`"),
        ({}, int | str, [], "must be a whole number or text - at `$.value`"),
    ],
)
def test_what_a_value_must_be(meta, kind, value, said):
    struct = msgspec.defstruct("Fields", [("value", Annotated[kind, msgspec.Meta(**meta)] if meta else kind)])
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert({"value": value}, struct)
    assert plain_error(str(caught.value)) == said


@pytest.mark.parametrize("text", ["tomorrow", "2027-01-31", "2027-01-31T00:00:00"])
def test_what_a_time_must_be(text):
    struct = msgspec.defstruct("Fields", [("end", Annotated[datetime, msgspec.Meta(tz=True)] | None)])
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert({"end": text}, struct)
    said = "must be a time with its zone, as 2027-01-31T00:00:00Z - at `$.end`"
    assert plain_error(str(caught.value)) == said


def test_other_messages_stay():
    assert plain_error("Object contains unknown field `x`") == "Object contains unknown field `x`"
