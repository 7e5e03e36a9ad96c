"""uvicorn's parts that kvpin's connections use: a release that changes one must fail here."""

import re

from tests.fakes import client_of


async def test_answers_have_uvicorns_date_and_their_tasks_are_counted(engine, proxy):
    async with client_of(proxy) as client:
        answer = await client.get("/v1/models")
    assert re.fullmatch(r"\w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT", answer.headers["date"])
