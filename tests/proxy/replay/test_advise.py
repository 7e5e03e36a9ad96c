"""Advice from recordings."""

from hashlib import blake2b

import msgspec
import pytest

from proxy.observe.recorder import text_blocks
from proxy.replay.advise import AdviceLine, advise, read_recordings
from proxy.replay.trace import Recording, RecordingLine, TraceError

LONG = "a tide table for every port, " * 100
TOKENS = 1000


def line(session="s", client=None, *, is_system_first=False, **fields):
    text = text_blocks(fields, lambda: blake2b(digest_size=8, key=b"k"), is_system_first=is_system_first)
    return AdviceLine(TOKENS, session, text, client=client)


def chat(head, *texts, **fields):
    said = [{"role": "user", "content": text} for text in texts]
    return {"messages": [{"role": "system", "content": head}, *said], **fields}


def test_what_a_rule_makes_equal_is_saved():
    lines = [line(**chat(f"Now 2026-11-25T23:0{minute}:44Z. {LONG}", "Hi")) for minute in range(4)]
    advice = advise(lines)
    assert (advice.requests, advice.tokens, advice.cached_tokens) == (4, 4000, 0)
    assert list(advice.rules) == ["date_to_day", "volatile_last", "all"]
    for name in ("date_to_day", "all"):
        assert (advice.rules[name].tokens, advice.rules[name].requests) == (3000, 3)
    assert list(advice.changes) == ["system"]
    assert (advice.changes["system"].tokens, advice.changes["system"].requests) == (3000, 3)


def test_a_rule_that_changes_a_later_prompt_is_compared_with_the_ones_before():
    tools = [{"name": "a", "text": LONG}, {"name": "b", "text": LONG}]
    lines = [line(**chat("Be brief.", "Hi", tools=each)) for each in (tools, tools[::-1])]
    advice = advise(lines)
    assert advice.rules["tools_sorted"].tokens == TOKENS
    assert advice.rules["tools_sorted"].requests == 1
    assert list(advice.changes) == ["tools"]


def test_a_directory_in_the_system_prompt_costs_the_tools_that_follow_it():
    tools = [{"name": "a", "text": LONG}]
    for is_system_first, saved in ((True, 500), (False, 0)):
        lines = [
            line(
                None,
                "pi",
                is_system_first=is_system_first,
                **chat(f"Working directory: /home/me/{at}. {'Be brief. ' * 20}", LONG, tools=tools),
            )
            for at in "xy"
        ]
        # The user's words differ by the value that stands before them.
        rules = advise(lines).rules
        assert abs(rules["paths"].tokens - saved) < 100


def test_each_client_has_its_rules():
    lines = [
        line(None, client, **chat(f"{text.format(at)} {LONG}", "Hi"))
        for client, text in (("pi", "Today is 2026-11-0{}."), ("Cline", "Work in /home/me/{}."), (None, "{}"))
        for at in (1, 2)
    ]
    advice = advise(lines)
    assert {client: list(rules) for client, rules in advice.clients.items()} == {
        "Cline": ["paths", "all"],
        "pi": ["dates", "all"],
    }


def test_a_message_that_changed_costs_what_follows_it():
    advice = advise([line(**chat("Be brief.", LONG, text, LONG)) for text in ("one", "two")])
    assert list(advice.changes) == ["input"]
    assert 400 < advice.changes["input"].tokens < 600


def test_requests_without_text_or_session_are_counted():
    advice = advise([AdviceLine(TOKENS), line(None, **chat(LONG)), line(None, **chat(LONG))])
    assert (advice.requests, advice.unknown, advice.alone) == (2, 1, 2)
    assert advice.cached_tokens == TOKENS


def recorded(path, began, *lines, key="k"):
    about = msgspec.json.encode(RecordingLine(Recording(began, key)))
    path.write_bytes(b"\n".join((about, *map(msgspec.json.encode, lines), b"")))
    return path


def test_recordings_of_one_time_are_merged_by_it(tmp_path):
    def turn(at_ms, *texts):
        return msgspec.structs.replace(line(**chat("Be brief.", LONG, *texts)), timestamp=at_ms)

    first = recorded(tmp_path / "a", 100.0, turn(0.0), turn(9000.0, LONG, LONG))
    second = recorded(tmp_path / "b", 102.0, turn(1000.0, LONG))
    assert [each.timestamp for each in read_recordings(second, first)] == [0.0, 3000.0, 9000.0]


def test_recordings_that_do_not_belong_together_are_refused(tmp_path):
    first, other = recorded(tmp_path / "a", 1.0), recorded(tmp_path / "b", 1.0, key="other")
    with pytest.raises(TraceError, match=r"b: its ids were made with another key"):
        read_recordings(first, other)
    first.write_bytes(b"")
    with pytest.raises(TraceError, match=r"a: does not say when it began"):
        read_recordings(other, first)
