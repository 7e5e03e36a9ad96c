"""Which requests are the data plane's."""

import pytest

from tests.fakes import CHAT, connect_to, is_openai_error, post


@pytest.mark.parametrize("path", [CHAT, "/%761/chat/completions", "/v1%2Fchat/completions", "/v1/x?a=/y"])
async def test_what_is_under_v1_however_it_is_spelt(engine, proxy, path):
    reader, writer = await connect_to(proxy)
    writer.write(post(path, b'{"model": "m"}'))
    assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    writer.close()
    assert [exchange.target for exchange in engine.seen] == [path]


async def test_the_rest_is_not(engine, proxy, client):
    assert (await client.get("/health")).json() == {"status": "ok"}
    assert (await client.get("/v1x/models")).status_code == 404
    assert is_openai_error(await client.get("/v1"), 404, "not_found")
    assert not engine.seen
