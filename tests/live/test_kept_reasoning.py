"""Reasoning that a client leaves out of its history, on a real llama-server."""

import pytest

from tests.live.llama_world import llama_world

pytestmark = pytest.mark.live

# As Qwen's between tool calls: it keeps what was thought before an answer.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


@pytest.mark.parametrize("rules", [(), ("--normalise", "reasoning_kept")])
def test_what_the_model_thought_is_reused(tmp_path, rules):
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    with llama_world(tmp_path, "--jinja", "--chat-template-file", str(path), kvpin_flags=rules) as world:
        world.until_known()
        messages = [{"role": "user", "content": "How high is the water at Brest?"}]
        first = world.chat(messages, max_tokens=32).json()
        assert first["choices"][0]["message"]["reasoning_content"]
        said = {"role": "assistant", "content": first["choices"][0]["message"]["content"] or ""}
        second = world.chat([*messages, said, {"role": "user", "content": "And at Saint-Malo?"}]).json()
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    # The last token of an answer is not in the cache.
    assert cached == (first["usage"]["total_tokens"] - 1 if rules else first["usage"]["prompt_tokens"])
