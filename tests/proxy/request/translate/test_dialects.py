import json

import pytest

from proxy.request.translate.wording import ANTHROPIC, OPENAI


@pytest.mark.parametrize(
    "said",
    [
        "this model's context is 8192 tokens; the prompt has 9000",
        "this model's context is 8192 tokens; the prompt has at least 9000",
        "This model's maximum context length is 8192 tokens. However, you requested 9000 tokens.",
    ],
)
def test_agents_read_how_much_too_long_a_prompt_is(said):
    error = {"kind": "invalid_request_error", "code": "context_length_exceeded"}
    body = json.loads(ANTHROPIC.error(400, said, **error))
    assert body["error"]["message"] == "prompt is too long: 9000 tokens > 8192 maximum"
    assert json.loads(OPENAI.error(400, said, **error))["error"]["message"] == said


def test_agents_know_a_prompt_that_does_not_fit_by_its_message():
    error = {"kind": "invalid_request_error", "code": "context_length_exceeded", "more": {"n_ctx": 8}}
    body = json.loads(ANTHROPIC.error(400, "it has 9 tokens", **error))
    assert body["error"] == {
        "type": "invalid_request_error",
        "message": "prompt is too long: it has 9 tokens",
    }
    assert json.loads(OPENAI.error(400, "it has 9 tokens", **error))["error"] == {
        "message": "it has 9 tokens",
        "type": "invalid_request_error",
        "param": None,
        "code": "context_length_exceeded",
        "n_ctx": 8,
    }
