import base64
import threading
from importlib import import_module

import numpy as np
import pytest
from safetensors.numpy import save

from engine_adapter.prompt import extra_ids
from tests.kv_world import safetensors_of

routes = import_module("proxy.api.admin.key_routes")  # the package has a function of that name
RAW = {"content-type": "application/octet-stream"}


async def test_raw_bytes(client, pair):
    answer = await client.post("/prompt_tables?id=t&extra_id=7", content=safetensors_of(), headers=RAW)
    table = answer.json()
    assert (answer.status_code, table["table_id"], table["extra_id"]) == (200, "t", 7)
    assert (table["rows"], table["hidden"]) == (2, 4)
    assert "t" in pair[0].prompt_tables
    assert (await client.get("/prompt_tables")).json()["prompt_tables"] == [table]
    assert (await client.delete("/prompt_tables/t")).status_code == 204
    assert (await client.delete("/prompt_tables/t")).status_code == 404


async def test_json_and_ids_from_content(client, pair):
    data = base64.b64encode(safetensors_of()).decode()
    first = (await client.post("/prompt_tables", json={"data": data})).json()
    again = (await client.post("/prompt_tables", content=safetensors_of(), headers=RAW)).json()
    assert first == again
    assert first["extra_id"] > 0


@pytest.mark.parametrize(
    "text", ["0", "-1", "1.5", "18446744073709551616", "9" * 40, "٣", "18446744073709551615"]
)
async def test_extra_ids_are_uint64_above_0(client, pair, text):
    given = {"extra_id": text}
    answer = await client.post("/prompt_tables", params=given, content=safetensors_of(), headers=RAW)
    if text == str(2**64 - 1):
        assert answer.json()["extra_id"] == 2**64 - 1
    else:
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "extra_id")


@pytest.mark.parametrize(
    ("body", "param"), [({}, "data"), ({"data": "%%"}, "data"), ({"data": "", "name": "x"}, "name")]
)
async def test_wrong_json_names_its_field(client, pair, body, param):
    answer = await client.post("/prompt_tables", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("as_json", [True, False])
async def test_a_large_table_is_read_off_the_event_loop(client, pair, monkeypatch, as_json):
    """A table may have 128 MiB: reading and hashing it took 445 ms, in which no request was served."""
    data = save({"t": np.zeros((512, 1024), np.float32)})
    threads = {"hashed": [], "decoded": []}
    content, decode = extra_ids.Embeddings.content, routes.decode
    loop = threading.current_thread()

    def noted(name, work):
        threads[name].append(threading.current_thread())
        return work()

    monkeypatch.setattr(extra_ids.Embeddings, "content", lambda self: noted("hashed", lambda: content(self)))
    monkeypatch.setattr(routes, "decode", lambda *given: noted("decoded", lambda: decode(*given)))
    body = (
        {"json": {"data": base64.b64encode(data).decode()}} if as_json else {"content": data, "headers": RAW}
    )
    answer = await client.post("/prompt_tables", **body)
    assert answer.json()["rows"] == 512
    assert len(threads["decoded"]) == as_json
    assert len(threads["hashed"]) == 1
    assert loop not in threads["hashed"] + threads["decoded"]
