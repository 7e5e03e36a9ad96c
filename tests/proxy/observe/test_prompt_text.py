"""The text of prompts as hashes."""

from hashlib import blake2b

from proxy.observe.recorder import BLOCK_BYTES, text_blocks
from proxy.replay.trace import ALL

LONG = "a tide table for every port, " * 40


def blocks(**fields):
    return text_blocks(fields, lambda: blake2b(digest_size=8, key=b"k"))


def system(text):
    return {"role": "system", "content": text}


def user(content):
    return {"role": "user", "content": content}


def common(one, other):
    return next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def test_a_conversation_that_goes_on_shares_all_blocks():
    first = blocks(messages=[user(LONG)])
    more = blocks(messages=[user(LONG), {"role": "assistant", "content": LONG}])
    assert len(first.ids) == len(LONG) // BLOCK_BYTES
    assert more.ids[: len(first.ids)] == first.ids


def test_an_id_stands_for_all_before_it():
    one, other = blocks(messages=[user("a" + LONG)]), blocks(messages=[user("b" + LONG)])
    assert not set(one.ids) & set(other.ids)


def test_marks_for_the_cache_and_the_form_of_a_text_do_not_count():
    marked = [{"type": "text", "text": LONG, "cache_control": {"type": "ephemeral"}}]
    assert blocks(messages=[user(marked)]) == blocks(messages=[user(LONG)])
    two = [{"type": "text", "text": LONG, "prompt_cache_breakpoint": {}}, {"type": "text", "text": "b"}]
    assert (
        blocks(messages=[user(two)]).ids
        == blocks(messages=[user([{"type": "text", "text": LONG}, two[1]])]).ids
    )


def test_the_tools_and_the_system_prompt_end_somewhere():
    found = blocks(tools=[{"name": LONG}], system=LONG, messages=[system(LONG), user(LONG)])
    each = len(LONG) / BLOCK_BYTES
    assert each < found.tools < found.system < len(found.ids) < 4 * each + 2
    assert found.tools <= each + 2
    assert found.system <= 3 * each + 2


def test_the_order_is_that_of_the_chat_template():
    def of(system, *, is_system_first):
        tools, messages = [{"name": LONG}], [{"role": "system", "content": system}, user(LONG)]
        fields = {"tools": tools, "messages": messages}
        return text_blocks(fields, lambda: blake2b(digest_size=8, key=b"k"), is_system_first=is_system_first)

    for is_system_first in (False, True):
        one, other = (of(system + LONG, is_system_first=is_system_first) for system in "ab")
        shared = common(one.ids, other.ids)
        assert (shared == 0) is is_system_first
        assert (0 < one.system < one.tools) is is_system_first
        assert max(one.system, one.tools) < len(one.ids)
    assert blocks(messages=[user(LONG)]).tools == blocks(messages=[user(LONG)]).system == 0


def test_a_rule_makes_prompts_equal_that_differ_in_what_it_changes():
    one, other = (
        blocks(messages=[system(f"Now 2026-11-25T23:0{minute}:44Z. {LONG}"), user("Hi")]) for minute in (1, 2)
    )
    assert common(one.ids, other.ids) == 0
    assert one.changed["date_to_day"] == other.changed["date_to_day"]
    assert one.changed.keys() == {"date_to_day", "volatile_last", ALL}
    assert blocks(messages=[user(LONG)]).changed == {}
    assert blocks(messages=["Hi", 7, user(["x"])], tools="none").ids == []
