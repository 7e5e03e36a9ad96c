import msgspec
import pytest

from engine_adapter.lmcache import wire


def test_a_real_placement_is_read():
    recorded = b"""{"chunks":1,"results":[{"key":{"chunk_hash_hex":"92dd","model_name":"/models/tiny",
        "kv_rank":16777472,"object_group_id":0,"cache_salt":""},"placements":[
        {"instance_id":"node-a","incarnation":1795251773,"tier":"l1","backend":"dram","size_bytes":131072,
        "shared":false}],"token_ids":[],"access_count":1}]}"""
    lookup = msgspec.json.decode(recorded, type=wire.Lookup)
    key = wire.Key("92dd", "/models/tiny", 16777472)
    assert lookup.results[0].key == key
    assert lookup.results[0].placements == [wire.Placement("node-a", "l1", 131072)]
    assert msgspec.json.decode(msgspec.json.encode(key), type=wire.Key) == key


@pytest.mark.parametrize(("pending", "in_flight", "is_storing"), [(0, 0, False), (3, 0, True), (0, 1, True)])
def test_what_a_node_holds_and_is_about_to_write(pending, in_flight, is_storing):
    storage = wire.Storage(
        {"_default": wire.L1(5), "other": wire.L1(2)},
        {"_default": wire.Storing(), "other": wire.Storing(pending, in_flight)},
        1,
    )
    assert (storage.l1_objects, storage.is_storing) == (7, is_storing)
