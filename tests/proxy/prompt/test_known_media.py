"""Chats with images. The engine here writes 🙂 for each, and three placeholders in its place."""

from array import array

import pytest

from engine_adapter import Capability
from engine_adapter.prompt.chat import ChatPrompt
from engine_adapter.prompt.extra_ids import mark_media
from engine_adapter.types import MediaSpan, RenderedPrompt
from proxy.prompt.known_chats import KnownMedia, TextAround
from proxy.prompt.media import find_media
from tests.fakes import prompts_of
from tests.proxy.prompt.test_media import CAT, CHAT, DOG, body_of, image, text

PLACEHOLDERS = [9, 9, 9]


class Renderer:
    """The part of an adapter that builders use for requests with images, over the model's tokenizer."""

    def __init__(self, tokenizer, *, tail=()):
        self.tokenizer, self.asked, self.tail = tokenizer, 0, list(tail)

    async def render(self, path, body):
        self.asked += 1
        messages = body.get("messages")
        media, plain = find_media({"messages": messages}), []
        for each in messages:
            parts = [text(each["content"])] if isinstance(each["content"], str) else each["content"]
            plain.append({**each, "content": "".join(part.get("text", "🙂") for part in parts)})
        kwargs = body.get("chat_template_kwargs")
        ids = self.tokenizer.chat(plain, template_kwargs=kwargs, vocab_size=None).token_ids.tolist()
        mark, spans = self.tokenizer.encode("🙂", add_special_tokens=False).tolist(), []
        for part in media:
            at = next(n for n in range(len(ids)) if ids[n : n + len(mark)] == mark)
            ids[at : at + len(mark)] = PLACEHOLDERS
            spans.append(MediaSpan(part.uuid or part.digest().hex(), at, len(PLACEHOLDERS)))
        return RenderedPrompt(array("i", ids + self.tail), tuple(spans))


@pytest.fixture
def builder_of(info_of, engine):
    def builder_of(renderer):
        info = info_of(Capability.RENDER, Capability.TOKENIZE)
        return prompts_of(info, engines=lambda _: [engine], renderers=lambda _: [renderer])

    return builder_of


@pytest.fixture
def renderer(engine):
    return Renderer(engine.tokenizer)


SYSTEM = {"role": "system", "content": "You look at pictures."}
FIRST = [SYSTEM, {"role": "user", "content": [text("see"), image(CAT), text("What?")]}]
SECOND = [*FIRST, {"role": "assistant", "content": "A cat."}, {"role": "user", "content": "And now?"}]


async def made(builder, messages, salt=None, **fields):
    return await builder.build(CHAT, body_of(messages=messages, **fields), salt=salt, tenant=salt)


async def test_a_next_turn_with_the_same_images_is_made_here_with_the_engines_ids(builder_of, renderer):
    builder, other = builder_of(renderer), Renderer(renderer.tokenizer)
    await made(builder, FIRST)
    third = [*SECOND, {"role": "assistant", "content": "Still."}, {"role": "user", "content": [text("Why?")]}]
    for messages in (FIRST, SECOND, third):
        ours = await made(builder, messages, stream=True, max_tokens=7)
        assert ours == await made(builder_of(other), messages)
        assert (ours.media, ours.whole, ours.exact, ours.source) == (True, True, False, "engine")
    assert (renderer.asked, other.asked) == (1, 3)


async def test_whatever_may_change_the_head_is_rendered(builder_of, renderer):
    builder = builder_of(renderer)
    dog, later = image(DOG), {"role": "user", "content": [text("and"), image(DOG)]}
    cases = [
        (FIRST, {}),
        (FIRST, {"mm_processor_kwargs": {"min_pixels": 9}}),
        (FIRST, {"a_field_that_kvpin_does_not_know": 1}),
        (FIRST, {"salt": "of a tenant"}),
        ([{**SYSTEM, "content": "You look."}, *FIRST[1:]], {}),
        ([SYSTEM, {"role": "user", "content": [text("see"), dog, text("What?")]}], {}),
        ([SYSTEM, {"role": "user", "content": [text("see"), image(CAT, detail="low"), text("What?")]}], {}),
        ([*SECOND, later], {}),
        ([FIRST[1], {"role": "user", "content": "0"}, later], {}),
        ([{"role": "user", "content": "0"}, FIRST[1], later], {}),
    ]
    for number, (messages, fields) in enumerate(cases, 1):
        for _ in range(2):
            await made(builder, messages, **fields)
            assert renderer.asked == number, (messages, fields)


async def test_what_the_engine_writes_otherwise_is_rendered_each_time(builder_of, engine):
    renderer = Renderer(engine.tokenizer, tail=[5])
    builder = builder_of(renderer)
    for _ in range(3):
        assert (await made(builder, FIRST)).token_ids[-1] == 5
    assert renderer.asked == 3
    builder.ask_engines("to try it")
    assert await made(builder, FIRST) is not None
    assert (renderer.asked, engine.asked) == (4, [])


def around(head, tail):
    one, other = (array("i", [*head, each, *tail]) for each in (50, 51))
    return TextAround.of(one, other)


def rendered(head, tail, at=1):
    ids = array("i", [*head, 9, 9, *tail])
    return ChatPrompt(ids, mark_media(len(ids), [MediaSpan("cat", at, 2)]))


def test_the_text_around_is_what_two_texts_share():
    found = around([1, 2], [3, 4])
    assert (found.before, found.after) == (2, 2)
    assert (found.head.tolist(), found.tail.tolist()) == ([1, 2, 50], [3, 4])
    same = array("i", [1, 1, 1])
    assert (TextAround.of(same, same).before, TextAround.of(same, same).after) == (3, 0)


def test_a_head_is_only_learned_from_a_prompt_that_ends_as_ours_and_found_where_text_goes_on_alike():
    known, ours = KnownMedia(), around([1], [3, 4])
    for other in (rendered([1], [3, 5]), rendered([1], [3, 4], at=4), ChatPrompt(array("i", [1, 3, 4]))):
        known.learn(b"k", ours, other)
    known.learn(b"k", around([1], []), rendered([1], []))
    assert known.find(b"k", ours) is None
    known.learn(b"k", ours, rendered([1], [3, 4]))
    assert known.find(b"k", around([1], [3, 6, 7])) == rendered([1], [3, 6, 7])
    assert known.find(b"k", around([1], [4, 3])) is None
    assert known.find(b"k", around([1], [])) is None


def test_the_least_recently_used_heads_are_forgotten():
    known, ours = KnownMedia(limit=3 * 67), around([1], [3])
    for key in (b"a", b"b", b"c", b"c"):
        known.learn(key, ours, rendered([1], [3]))
    assert known.find(b"a", ours) is not None
    known.learn(b"d", ours, rendered([1], [3]))
    kept = [known.find(key, ours) is not None for key in (b"a", b"b", b"c", b"d")]
    assert kept == [True, False, True, True]
