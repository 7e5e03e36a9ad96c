"""Messages that a chat template refuses or loses, on a real llama-server, as coding agents send them."""

import httpx
import pytest

from tests.live.llama_world import MODEL, WAIT_S, llama_world

pytestmark = pytest.mark.live

_TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
_END = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
# As Qwen3.5's: a system message may only come first.
REFUSES = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    + _TURN
    + "{% endfor %}"
    + _END
)
# As many: others are left out without a word.
LOSES = (
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] or (loop.first and m.role == 'system') %}"
    + _TURN
    + "{% endif %}{% endfor %}"
    + _END
)
ROLES = (
    "{% for m in messages %}{% if m.role == 'critic' %}{{ raise_exception('No such role') }}{% endif %}"
    + _TURN
    + "{% endfor %}"
    + _END
)
LATE = "Only the tide table of Brest counts."


@pytest.mark.parametrize("template", [REFUSES, LOSES], ids=["refuses", "loses"])
def test_no_instruction_is_lost(tmp_path, template):
    path = tmp_path / "template.jinja"
    path.write_text(template)
    with llama_world(tmp_path, "--chat-template-file", str(path)) as world:
        late = {"messages": [{"role": "user", "content": "Hi"}, {"role": "system", "content": LATE}]}
        world.until(lambda: "x-kvpin-normalised" in world.post("chat/completions", late).headers, "a repair")
        server = world.servers[0].url

        def ask(route, body):
            return world.post(route, {"max_tokens": 4, "temperature": 0, **body}).raise_for_status()

        def straight(messages):
            body = {"model": MODEL, "messages": messages}
            answer = httpx.post(f"{server}/apply-template", json=body, timeout=WAIT_S, trust_env=False)
            return answer.json()["prompt"] if answer.is_success else None

        talk = [{"role": "user", "content": "How high is the water?"}, {"role": "system", "content": LATE}]
        if template == REFUSES:
            assert straight([{"role": "system", "content": "Be brief."}, *talk]) is None
        else:
            assert LATE not in straight([{"role": "system", "content": "Be brief."}, *talk])
        _whole_in(world, ask("messages", {"system": "Be brief.", "messages": talk}))
        _whole_in(world, ask("responses", {"instructions": "Be brief.", "input": talk}))
        messages, n_before = [{"role": "system", "content": "Be brief."}], 0
        for at in range(8):
            messages += [{"role": "user", "content": f"Question {at}?"}, {"role": "system", "content": LATE}]
            answer = ask("chat/completions", {"messages": messages})
            assert answer.headers["x-kvpin-normalised"] == "late_system_in_turn"
            usage = answer.json()["usage"]
            # All of the prompt before is reused, but for its last token.
            assert usage["prompt_tokens_details"]["cached_tokens"] >= n_before - 1
            assert usage["prompt_tokens"] > n_before + len(LATE) / 8
            n_before = usage["prompt_tokens"]
            messages.append(
                {"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]}
            )


def _whole_in(world, answer):
    """The prompt holds the late message: without it, it would be shorter."""
    assert answer.headers["x-kvpin-normalised"] == "late_system_in_turn"
    usage = answer.json()["usage"]
    n_tokens = usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
    url = f"{world.servers[0].url}/tokenize"
    late = httpx.post(url, json={"content": LATE}, timeout=WAIT_S, trust_env=False).json()["tokens"]
    assert n_tokens > len(late) + 10


def test_a_role_that_the_template_refuses_is_the_clients_fault(tmp_path):
    """llama-server mostly says 500, which SDKs would try again."""
    path = tmp_path / "template.jinja"
    path.write_text(ROLES)
    with llama_world(tmp_path, "--chat-template-file", str(path), servers=2) as world:
        for messages in ([{"role": "critic", "content": "Hm."}], [{"content": "Hi"}]):
            body = {"model": MODEL, "messages": messages, "max_tokens": 2}
            straight = httpx.post(
                f"{world.servers[0].url}/v1/chat/completions", json=body, timeout=WAIT_S, trust_env=False
            )
            answer = world.post("chat/completions", body)
            assert answer.status_code == 400
            assert answer.json()["error"]["type"] == "invalid_request_error"
            assert len(world.record_of(answer)["attempts"]) <= 1
        assert straight.status_code == 500
        assert "Missing 'role'" in answer.json()["error"]["message"]
