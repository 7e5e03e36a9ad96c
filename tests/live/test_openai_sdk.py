"""The stock OpenAI SDK against kvpin."""

from __future__ import annotations

import openai
import pytest
from openai import OpenAI

from tests.live.answers import user

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def client(kvpin):
    with OpenAI(base_url=kvpin.base_url, api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(client):
    return client.models.list().data[0].id


def test_completions_by_text_and_by_token_ids(client, model):
    by_text = client.completions.create(model=model, prompt="The harbour is", max_tokens=6, temperature=0)
    raw = client.completions.with_raw_response.create(
        model=model, prompt=[300, 301, 302, 303], max_tokens=6, temperature=0
    )
    by_ids = raw.parse()
    assert by_text.choices[0].finish_reason == "length"
    assert by_ids.usage.prompt_tokens == 4
    assert raw.headers["x-kvpin-engine"].startswith("embedded-")
    assert raw.headers["x-kvpin-predicted-tokens"] == "0"
    assert raw.headers["x-kvpin-cached-tokens"] == "0"


@pytest.mark.parametrize(
    ("changes", "error", "param"),
    [
        ({"model": "no-such-model"}, openai.NotFoundError, "model"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"n": 0}, openai.BadRequestError, "n"),
        ({"stop": [1]}, openai.BadRequestError, "stop"),
        ({"messages": [{"role": "user", "content": "word " * 20_000}]}, openai.BadRequestError, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, openai.BadRequestError, None),
        ({"extra_body": {"cache_salt": ""}}, openai.BadRequestError, "cache_salt"),
    ],
)
def test_each_client_error_has_its_class_and_field(client, model, changes, error, param):
    asked = {"model": model, "messages": user("Hi."), "max_tokens": 1} | changes
    with pytest.raises(error) as caught:
        client.chat.completions.create(**asked)
    assert caught.value.body["message"]
    if param is not None:
        assert caught.value.param is not None
        assert caught.value.param.startswith(param)
