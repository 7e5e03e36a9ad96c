import json
import time
from contextlib import aclosing

import pytest
from starlette.applications import Starlette
from starlette.responses import StreamingResponse
from starlette.routing import Route

from engine_adapter import Headers, HttpTransport
from tests.engines import served

LATE_S = 100.0


@pytest.fixture
def question(script):
    import router_work

    return script.Question(0.0, "s", (), (1, 2), router_work.answer_ids((1, 2), 3))


@pytest.fixture
def engine(script, question):
    """Answers the question at once."""
    event = json.dumps({"choices": [{"delta": {"content": script.text_of(question.answer)}}]})

    async def answer(_):
        return StreamingResponse(iter([f"data: {event}\n\ndata: [DONE]\n\n"]))

    with served(Starlette(routes=[Route(script.CHAT, answer, methods=["POST"])])) as url:
        yield f"{url}{script.CHAT}"


async def test_what_the_client_is_late_by_is_waited_for(script, engine, question):
    async with aclosing(HttpTransport()) as transport:
        answer = await script.ask(transport, engine, Headers([]), question, time.monotonic() - LATE_S)
    assert answer.error == ""
    assert answer.first_token_s > answer.sent_late_s >= LATE_S
