import base64
import json
from array import array

import msgspec
import pytest

from engine_adapter import Capability, EngineRejected, EngineUnavailable, JsonBody
from engine_adapter.prompt.extra_ids import mark_media
from engine_adapter.types import MediaSpan, RenderedPrompt, token_array
from proxy.errors import BadRequest
from proxy.prompt import MediaUuids
from proxy.prompt.media import MOST_MEDIA, find_media, media_fields
from tests.fakes import prompts_of

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
CAT, DOG = b"\x89PNG cat", b"\x89PNG dog"


def data_url(content, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def image(content=CAT, **fields):
    return {"type": "image_url", "image_url": {"url": data_url(content)}, **fields}


def elsewhere(**fields):
    return {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}, **fields}


def text(content):
    return {"type": "text", "text": content}


def chat(*parts, system="You are a guide. " * 8, **fields):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": list(parts)}]
    return body_of(messages=messages[0 if system else 1 :], **fields)


def body_of(**fields):
    return JsonBody(json.dumps(fields).encode())


def parts_of(body):
    return body.get("messages")[-1]["content"]


def found(**fields):
    return find_media(media_fields(body_of(**fields)))


class TestFindingMedia:
    @pytest.mark.parametrize(
        ("part", "kind"),
        [
            (image(), "image"),
            ({"type": "input_image", "image_url": data_url(CAT)}, "image"),
            (
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}},
                "image",
            ),
            ({"type": "input_audio", "input_audio": {"data": "eA==", "format": "wav"}}, "audio"),
            ({"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,eA=="}}, "audio"),
            ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,eA=="}}, "video"),
            ({"type": "image_embeds", "image_embeds": "eA=="}, "image"),
            ({"type": "input_file", "file_data": "eA=="}, "file"),
        ],
        ids=lambda value: value if isinstance(value, str) else value["type"],
    )
    def test_every_form(self, part, kind):
        (media,) = found(messages=[{"role": "user", "content": [text("a"), part]}])
        assert (media.param, media.kind, media.is_lasting) == ("messages[0].content[1]", kind, True)
        assert media.digest() is not None

    @pytest.mark.parametrize(
        ("item", "lasting"),
        [
            (elsewhere(), False),
            (elsewhere(uuid="u"), True),
            ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, False),
            ({"type": "image", "source": {"type": "url", "url": "https://example.org/"}}, False),
            ({"type": "image_url", "image_url": {"url": "DATA:image/png;base64,eA=="}}, True),
            ({"type": "image_url", "image_url": None, "uuid": "u"}, True),
            ({"type": "prompt_embeds", "data": "eA=="}, False),
        ],
    )
    def test_what_is_the_same_each_time(self, item, lasting):
        (media,) = found(messages=[{"role": "user", "content": [item]}])
        assert media.is_lasting is lasting

    @pytest.mark.parametrize(
        "item", [elsewhere(), {"type": "image_url", "image_url": {}}, {"image_url": None}]
    )
    def test_content_that_is_not_here_has_no_digest(self, item):
        assert found(input=[{"content": [item]}])[0].digest() is None

    def test_a_digest_is_of_the_decoded_bytes(self):
        def digest(part):
            return found(messages=[{"content": [part]}])[0].digest()

        assert digest(image()) == digest({"type": "input_image", "image_url": data_url(CAT, "image/x")})
        odd = [data_url(CAT) + "*", "data:,cat", "data:image/png,cat"]
        parts = [image(), image(DOG), *({"image_url": address} for address in odd)]
        parts += [{"video_url": data_url(CAT)}, {"input_audio": {"data": "eA==", "format": "wav"}}]
        parts += [{"input_audio": {"data": "eA==", "format": "mp3"}}]
        assert len({digest(part) for part in parts}) == len(parts)


class TestUuids:
    async def test_text_is_not_searched_for_a_uuid(self):
        plain = [{"role": role, "content": 'a "uuid"'} for role in ("system", "user", "assistant")]
        for fields in ({"messages": plain}, {"messages": None}, {"messages": "uuid"}):
            body = body_of(**fields)
            assert await MediaUuids().admit(body, "salt") is body

    async def test_messages_that_cannot_be_read_pass_without_a_uuid(self):
        """The engine answers for them."""
        body = JsonBody(b'{"messages": [{"role": "user", "content": 1e999}]}')
        assert await MediaUuids().admit(body, "salt") is body
        with pytest.raises(msgspec.DecodeError):
            await MediaUuids().admit(JsonBody(body.raw.replace(b"user", b"uuid")), "salt")

    @pytest.mark.parametrize(
        "body",
        [
            chat(text("a"), image(DOG, uuid="cat")),
            chat(text("a"), image(DOG, uuid="cat") | {"type": "text", "text": "a"}),
            chat(text("a"), {"type": "video_url", "video_url": {"url": data_url(CAT)}, "uuid": "cat"}),
            JsonBody(chat(text("a"), image(DOG, uuid="cat")).raw.replace(b'"uuid"', b'"\\u0075\\u0075id"')),
        ],
        ids=["image", "it calls itself text", "of another kind", "an escaped name"],
    )
    async def test_other_content_under_a_known_uuid_is_refused(self, body):
        uuids = MediaUuids()
        await uuids.admit(chat(image(uuid="cat")), None)
        with pytest.raises(BadRequest, match="other content") as error:
            await uuids.admit(body, None)
        assert error.value.param == "messages[1].content[1].uuid"

    async def test_also_within_a_request(self):
        with pytest.raises(BadRequest):
            await MediaUuids().admit(chat(image(uuid="cat"), image(DOG, uuid="cat")), None)

    async def test_in_a_part_that_holds_no_image_at_all(self):
        """vLLM takes these for the image that was last sent under the uuid, by anybody."""
        for part in ({"image_pil": None}, {"type": "image_pil", "image_pil": None}, {"type": "image_pil"}):
            scoped = await MediaUuids().admit(chat(part | {"uuid": "cat"}), "salt")
            assert parts_of(scoped)[0]["uuid"].startswith("kvpin-")

    @pytest.mark.parametrize(
        "part", [elsewhere(uuid="cat"), {"type": "image_url", "image_url": None, "uuid": "cat"}]
    )
    async def test_a_uuid_whose_content_is_not_here_is_passed_on(self, part):
        uuids = MediaUuids()
        await uuids.admit(chat(image(uuid="cat")), None)
        body = chat(part)
        assert await uuids.admit(body, None) is body
        with pytest.raises(BadRequest):
            await uuids.admit(chat(image(DOG, uuid="cat")), None)

    @pytest.mark.parametrize("uuid", [5, ["a"], {"a": 1}, True])
    async def test_one_that_is_no_string(self, uuid):
        with pytest.raises(BadRequest, match="must be a string") as error:
            await MediaUuids().admit(chat(image(uuid=uuid)), None)
        assert error.value.param == "messages[1].content[0].uuid"

    async def test_nesting_is_not_followed_without_end(self):
        """In lists without end, each name of a part was once built anew: 10 MiB took minutes."""
        deep = b"[" * 900 + b'{"type":"text","text":"t","uuid":"u"}' + b"]" * 900
        body = JsonBody(b'{"messages":[{"role":"user","content":[%b]}]}' % b",".join([deep] * 100))
        with pytest.raises(BadRequest, match="messages is nested more than 12 deep"):
            await MediaUuids().admit(body, "salt")

    async def test_under_a_salt_it_is_that_salts_own_and_nothing_else_changes(self):
        uuids = MediaUuids()
        body = chat(image(uuid="cat"), text("ą\n"), elsewhere(uuid="cat"), image(DOG), model="m", top_p=0.5)
        mine, again, theirs = [await uuids.admit(body, salt) for salt in ("mine", "mine", "theirs")]
        assert mine.raw == again.raw
        first, _, second, _ = parts = parts_of(mine)
        assert first["uuid"] == second["uuid"]
        assert len({first["uuid"], parts_of(theirs)[0]["uuid"], "cat"}) == 3
        first["uuid"] = second["uuid"] = "cat"
        assert parts == parts_of(body)
        assert (mine.get("model"), mine.get("top_p")) == ("m", 0.5)

    async def test_salts_cannot_make_each_others_uuids_fail(self):
        uuids = MediaUuids()
        for number, salt in enumerate(("a", "b", None, "")):
            await uuids.admit(chat(image(b"%d" % number, uuid="cat")), salt)
        with pytest.raises(BadRequest):
            await uuids.admit(chat(image(b"1", uuid="cat")), "a")

    async def test_trusted_uuids_are_believed_and_still_their_salts(self):
        uuids = MediaUuids(trusted=True)
        for content in (CAT, DOG):
            body = chat(image(content, uuid="cat"))
            assert await uuids.admit(body, None) is body
        names = {parts_of(await uuids.admit(chat(image(uuid="cat")), salt))[0]["uuid"] for salt in "ab"}
        assert len(names) == 2

    async def test_memory_is_bounded_and_the_least_used_go_first(self):
        uuids = MediaUuids(limit=2)
        for name in ("cat", "dog", "cat", "cow"):
            await uuids.admit(chat(image(uuid=name)), None)
        await uuids.admit(chat(image(DOG, uuid="dog")), None)  # forgotten; now cat is
        await uuids.admit(chat(image(DOG, uuid="cat")), None)
        with pytest.raises(BadRequest):
            await uuids.admit(chat(image(CAT, uuid="cat")), None)

    async def test_no_tenant_pushes_out_the_uuids_of_another(self):
        """Other content would then be accepted under them."""
        uuids = MediaUuids(limit=100)
        await uuids.admit(chat(image(CAT, uuid="cat")), "a", "a")
        for number in range(300):
            await uuids.admit(chat(image(uuid=f"{number}")), "b", "b")
            assert sum(map(len, uuids._seen.values())) == uuids._count <= 100
        with pytest.raises(BadRequest):
            await uuids.admit(chat(image(DOG, uuid="cat")), "a", "a")


class RenderingEngine:
    """The part of an adapter that builders use for requests with images: every image is two tokens."""

    def __init__(self, error=None):
        self.asked = []
        self.error = error

    async def render(self, path, body):
        self.asked.append(path)
        if self.error is not None:
            raise self.error
        media = find_media(media_fields(body))
        spans = [MediaSpan(part.uuid or part.digest().hex(), 3 + 4 * at, 2) for at, part in enumerate(media)]
        return RenderedPrompt(token_array([5, 6, 7, *[9, 9, 5, 6] * len(media)]), tuple(spans))


@pytest.fixture
def builder_of(info_of, engine):
    able = info_of(Capability.RENDER, Capability.TOKENIZE)

    def builder_of(*renderers, info=able):
        return prompts_of(info, engines=lambda _: [engine], renderers=lambda _: renderers)

    return builder_of


async def build(builder, body, path=CHAT):
    return await builder.build(path, body, salt="s", lora="ada")


class TestRendering:
    async def test_images_are_marked_where_they_begin(self, builder_of):
        prompt = await build(builder_of(RenderingEngine()), chat(image(uuid="cat"), image(DOG, uuid="dog")))
        assert prompt.token_ids == array("i", [5, 6, 7, 9, 9, 5, 6, 9, 9, 5, 6])
        assert prompt.extra_ids == mark_media(11, [MediaSpan("cat", 3, 2), MediaSpan("dog", 7, 2)])
        assert (prompt.salt, prompt.lora, prompt.source) == ("s", "ada", "engine")
        # Not exact: its ids, sent in place of the chat, would leave the images out.
        assert (prompt.exact, prompt.media, prompt.whole, prompt.kv.exact) == (False, True, True, False)

    async def test_no_engine_is_asked_for_text(self, builder_of, engine):
        renderer = RenderingEngine()
        builder = builder_of(renderer)
        for body in (chat(text("a"), text("b")), body_of(messages=[{"role": "user", "content": "hi"}])):
            prompt = await build(builder, body)
            assert prompt.token_ids == engine.tokenizer.chat(body.get("messages")).token_ids
            assert (prompt.media, prompt.whole, prompt.source) == (False, True, "local")
        assert (renderer.asked, engine.asked) == ([], [])
        prompt = await build(builder, body_of(input="hi"), RESPONSES)
        assert (prompt.media, prompt.whole, renderer.asked, len(engine.asked)) == (False, True, [], 1)

    async def test_parts_that_turn_out_to_be_text(self, builder_of):
        prompt = await build(builder_of(RenderingEngine()), chat({"type": "refusal", "refusal": "no"}))
        assert prompt.token_ids == array("i", [5, 6, 7])
        assert (prompt.media, prompt.whole, prompt.source, prompt.exact) == (False, True, "engine", True)

    async def test_the_next_engine_is_asked_when_one_cannot(self, builder_of):
        failures = EngineUnavailable("gone"), EngineRejected("no", status=400), None
        renderers = [RenderingEngine(each) for each in failures]
        disguised = {"type": "text", "text": "a", "image_url": None, "uuid": "cat"}
        assert (await build(builder_of(*renderers), chat(disguised))).media
        assert [len(each.asked) for each in renderers] == [1, 1, 1]


class EmbeddingEngine:
    """The part of an adapter that builders use for prompts with embeddings."""

    async def render(self, path, body):
        if body.get("prompt_embeds") == "no":
            raise EngineRejected("no", status=400)
        return RenderedPrompt(token_array([0, 0, 0, 0, 0]), embeds=((0, b"one"), (4, b"two")))


class TestEmbeddings:
    ASKED = chat({"type": "prompt_embeds", "data": "AAAA"}, text("What is it?"))

    @pytest.fixture
    def builder(self, info_of):
        info = info_of(Capability.TOKENIZE)
        return prompts_of(info, embedders=lambda _: [EmbeddingEngine()])

    @pytest.mark.parametrize(
        ("path", "body"), [(CHAT, ASKED), (COMPLETIONS, body_of(prompt_embeds="AAAA"))], ids=["chat", "text"]
    )
    async def test_they_mark_the_blocks_of_the_engine(self, builder, path, body):
        prompt = await build(builder, body, path)
        assert prompt.extra_ids == mark_media(5, [], [(0, b"one"), (4, b"two")])
        # An engine may convert them, so that it holds other blocks than these.
        assert (prompt.media, prompt.whole, prompt.exact, prompt.source) == (True, False, False, "engine")

    async def test_other_engines_are_not_asked(self, builder_of):
        renderer = RenderingEngine()
        assert await build(builder_of(renderer), self.ASKED) is None
        assert await build(builder_of(renderer), body_of(prompt_embeds="AAAA"), COMPLETIONS) is None
        assert renderer.asked == []


class TestTheTextBefore:
    @pytest.fixture
    def refusing(self):
        return RenderingEngine(EngineRejected("no", status=400))

    async def test_what_may_change_is_not_asked_for(self, builder_of):
        renderer = RenderingEngine()
        prompt = await build(builder_of(renderer), chat(image(), elsewhere()))
        assert renderer.asked == []
        assert not prompt.whole

    async def test_it_is_what_comes_before_the_message_with_the_image(self, builder_of, refusing, engine):
        body = chat(text("What is"), image())
        prompt = await build(builder_of(refusing), body)
        system = engine.tokenizer.chat(body.get("messages")[:1], add_generation_prompt=False).token_ids
        assert len(system) > 16
        assert prompt.token_ids[: len(system)] == system
        same = await build(builder_of(refusing), chat(image(DOG), text("Something else altogether")))
        assert same.token_ids == prompt.token_ids
        assert (prompt.whole, prompt.exact, prompt.media, prompt.extra_ids) == (False, False, False, None)

    async def test_so_it_is_by_an_engine_that_tokenises(self, builder_of, engine):
        builder = builder_of()
        here = await build(builder, chat(text("What is"), image()))
        builder.ask_engines("to try it")
        assert (await build(builder, chat(text("What is"), image()))).token_ids == here.token_ids
        assert all("image_url" not in body.raw.decode() for body in engine.asked)

    async def test_turns_after_an_image_are_not_part_of_it(self, builder_of, refusing):
        first = chat(image())
        messages = [*first.get("messages"), {"role": "assistant", "content": "A cat."}]
        later = body_of(messages=[*messages, {"role": "user", "content": [text("Sure?")]}])
        builder = builder_of(refusing)
        assert (await build(builder, later)).token_ids == (await build(builder, first)).token_ids

    async def test_a_template_that_cannot_take_it(self, builder_of, refusing):
        messages = [{"role": "system", "content": "Hi."}, {"role": "nobody", "content": [image()]}, 5]
        assert await build(builder_of(refusing), body_of(messages=messages)) is None


class TestNumber:
    """More media than can be read in time is the client's fault, however small each of them is."""

    PARTS = (image(), {"type": "prompt_embeds", "data": "AAAA"}, {"type": "odd"})

    @pytest.mark.parametrize("part", PARTS)
    async def test_of_a_chat(self, builder_of, part):
        with pytest.raises(BadRequest, match="may hold 4096 images") as caught:
            await build(builder_of(), chat(*[part] * (MOST_MEDIA + 1)))
        assert caught.value.param == "messages"

    async def test_of_a_response_and_of_uuids(self, builder_of):
        parts = [{"type": "input_image", "image_url": data_url(CAT), "uuid": "u"}] * (MOST_MEDIA + 1)
        body = body_of(input=[{"role": "user", "content": parts}])
        with pytest.raises(BadRequest, match="may hold 4096 images"):
            await build(builder_of(), body, RESPONSES)
        with pytest.raises(BadRequest, match="may hold 4096 images"):
            await MediaUuids().admit(body, None)

    async def test_text_has_no_limit_of_its_own(self, builder_of):
        with pytest.raises(BadRequest, match="context is 2000 tokens"):
            await build(builder_of(), chat(*[text("a")] * (MOST_MEDIA + 1)))
