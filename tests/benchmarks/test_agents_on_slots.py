"""What the benchmark of agents reads from Codex and Claude Code, with programs that print as they do."""

import sys

import pytest

PROGRAM = """
import json, pathlib, sys
turn = len(list(pathlib.Path().glob("turn-*")))
pathlib.Path(f"turn-{turn}").write_text(json.dumps(sys.argv[1:]))
print("a line that is no event")
print('{"type": "turn.started"}')
if sys.argv[-1] == "fail":
    print('{"type": "turn.failed", "error": {"message": "Incomplete response returned"}}')
    sys.exit(1)
usage = {"input_tokens": (100, 230)[turn], "cached_input_tokens": (0, 90)[turn]}
print(json.dumps({"type": "turn.completed", "usage": usage}))
"""


@pytest.fixture
def conversation(tmp_path):
    from agents_on_slots import Conversation

    return Conversation("Codex", [sys.executable, "-c", PROGRAM], tmp_path / "home")


def test_a_turns_usage_is_what_it_adds_to_the_conversations(conversation):
    assert conversation.say("http://a", "one") == (0, 100)
    assert conversation.say("http://a", "two") == (90, 130)


def test_a_turn_that_codex_does_not_complete_ends_the_benchmark(conversation):
    with pytest.raises(SystemExit, match=r"Codex did not complete its turn: .*Incomplete response returned"):
        conversation.say("http://a", "fail")


CLAUDE = """
import json, sys
cached = 90 * ("-c" in sys.argv[1:])
usage = {"input_tokens": 10, "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}
print(json.dumps({"type": "result", "is_error": "fail" in sys.argv, "usage": usage}))
"""


def test_claude_code_tells_the_usage_of_a_turn_alone(tmp_path):
    from agents_on_slots import Conversation

    talk = Conversation("Claude Code", [sys.executable, "-c", CLAUDE], tmp_path / "home")
    assert [talk.say("http://a", "one"), talk.say("http://a", "two")] == [(0, 10), (90, 100)]
    with pytest.raises(SystemExit, match="Claude Code did not complete its turn"):
        talk.say("http://a", "fail")
