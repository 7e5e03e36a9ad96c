"""llama-servers that cannot parse the answer that they have generated: it is not generated once more."""

import httpx
import pytest

from tests.live.conftest import running_kvpin
from tests.llama import running_llama_server

pytestmark = pytest.mark.live

# The server takes this for gpt-oss's, whose answers name their channels. Those of a tiny model do not.
TEMPLATE = """{#- <|channel|> -#}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SAID = "The model produced output that does not match the expected"
ASK = {"messages": [{"role": "user", "content": "Zażółć gęślą jaźń"}], "max_tokens": 200, "stop": ["e"]}


@pytest.fixture(scope="module")
def kvpin(tmp_path_factory):
    path = tmp_path_factory.mktemp("unparsed")
    template = path / "template.jinja"
    template.write_text(TEMPLATE)
    flags = ("--chat-template-file", str(template))
    with (
        running_llama_server(path / "a", None, *flags) as a,
        running_llama_server(path / "b", None, *flags) as b,
        running_kvpin(
            path / "kvpin",
            *(f"--engine=llama_server={each.url},id={name}" for name, each in zip("ab", (a, b), strict=True)),
            tokenised=False,
        ) as kvpin,
    ):
        yield kvpin


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["chat/completions", "messages"])
def test_an_answer_that_cannot_be_parsed_is_generated_once_and_nobody_is_blamed(kvpin, route, stream):
    answer = httpx.post(
        f"{kvpin.url}/v1/{route}", json={**ASK, "model": "any", "stream": stream}, timeout=60, trust_env=False
    )
    record = kvpin.admin("GET", "requests").json()["requests"][-1]
    assert (answer.status_code, answer.headers["x-should-retry"]) == (500, "false")
    assert SAID in answer.json()["error"]["message"]
    assert (len(record["attempts"]), record["cause"]) == (1, "engine_rejected")
    assert {each["state"] for each in kvpin.engines().values()} == {"ready"}
    assert not any(each["last_error"] for each in kvpin.engines().values())
