import numpy as np
import pytest
from safetensors.numpy import save

from proxy.errors import BadRequest, BodyTooLarge, Conflict
from proxy.prompt import RegisteredTables


def data(fill, rows=2, hidden=4):
    return save({"t": np.full((rows, hidden), fill, np.float32)})


def test_the_default_id_comes_from_the_content():
    tables = RegisteredTables()
    table = tables.put(data(1.0))
    assert table.table_id == f"pt-{table.extra_id:016x}"
    assert (table.rows, table.hidden, table.data) == (2, 4, data(1.0))
    assert tables.put(data(1.0)) is table
    assert tables.list() == [table]
    assert tables.get(table.table_id) is table


def test_ids_may_be_chosen_and_two_names_may_mean_one_table():
    tables = RegisteredTables()
    table = tables.put(data(1.0), table_id="support", extra_id=7)
    again = tables.put(data(1.0), table_id="support-2", extra_id=7)
    assert (table.table_id, table.extra_id, again.extra_id) == ("support", 7, 7)
    assert tables.ref("support") == tables.ref("support-2") == tables.refs[7]
    tables.delete("support")
    assert 7 in tables.refs
    tables.delete("support-2")
    assert tables.refs == {}
    assert tables.ref("support") is None


@pytest.mark.parametrize(
    ("again", "param"),
    [
        ({"data": data(2.0), "table_id": "a"}, "table_id"),
        ({"data": data(2.0), "table_id": "b", "extra_id": 7}, "extra_id"),
        ({"data": data(1.0), "table_id": "a", "extra_id": 8}, "extra_id"),
        ({"data": data(1.0, rows=1), "table_id": "b", "extra_id": 7}, "extra_id"),
    ],
)
def test_an_id_means_one_content(again, param):
    tables = RegisteredTables()
    tables.put(data(1.0), table_id="a", extra_id=7)
    with pytest.raises(Conflict) as caught:
        tables.put(**again)
    assert caught.value.param == param


def test_an_extra_id_means_one_content_also_after_its_table_is_gone():
    tables = RegisteredTables()
    tables.put(data(1.0), table_id="a", extra_id=7)
    tables.delete("a")
    with pytest.raises(Conflict, match="extra id 7 already has other content"):
        tables.put(data(2.0), table_id="a", extra_id=7)
    assert tables.put(data(1.0), table_id="a", extra_id=7).rows == 2
    tables.delete("a")
    assert tables.put(data(2.0), table_id="a").extra_id != 7


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"table_id": ""}, "table_id"),
        ({"table_id": "a/b"}, "table_id"),
        ({"table_id": "x" * 129}, "table_id"),
        ({"extra_id": 0}, "extra_id"),
        ({"extra_id": 2**64}, "extra_id"),
    ],
)
def test_ids_that_cannot_be_used(options, param):
    with pytest.raises(BadRequest) as caught:
        RegisteredTables().put(data(1.0), **options)
    assert caught.value.param == param


def test_room_is_bounded_and_comes_back():
    tables = RegisteredTables(max_bytes=2 * len(data(1.0)))
    tables.put(data(1.0), table_id="a")
    tables.put(data(2.0), table_id="b")
    tables.put(data(2.0), table_id="b")
    with pytest.raises(BodyTooLarge):
        tables.put(data(3.0))
    tables.delete("a")
    assert sum(len(table.data) for table in tables.list()) == len(data(2.0))
    tables.put(data(3.0))
