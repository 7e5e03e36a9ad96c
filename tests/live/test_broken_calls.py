"""Arguments that a model broke off, in the history of a conversation, on real llama-servers."""

import pytest

from tests.live.llama_world import llama_world

pytestmark = pytest.mark.live

_CALLS = (
    "{% for c in m.tool_calls or [] %}"
    "{% for k, v in c.function.arguments.items() %}{{ k }}{{ v }}{% endfor %}"
    "{% endfor %}"
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    + _CALLS
    + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_the_call_is_named_once(tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    with llama_world(tmp_path, "--jinja", "--chat-template-file", str(path), servers=2) as world:
        for broken in ('{"port": ', "", "[1]"):
            call = {"id": "c1", "type": "function", "function": {"name": "tide", "arguments": broken}}
            messages = [
                {"role": "user", "content": "How high?"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "4 m"},
            ]
            answer = world.post("chat/completions", {"messages": messages, "max_tokens": 2})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "messages[1].tool_calls[0].function.arguments"
            assert len(world.record_of(answer)["attempts"]) == 1
